"""Makes docs/reconstructions.png out of a finished `make demo`: originals, and what CPL got out of one update each."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fedsim.wire.files import read_json_lines

COLUMNS, CELL, GAP, MARGIN = 8, 96, 6, 190
LINES = (
    ("undefended", "original", "private image"),
    ("undefended", "cpl", "no defense"),
    ("defended", "cpl", "clip(1) | gaussian(0.1)"),
)


def halves(demo: Path, run: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """(original, reconstruction) of the first examples, in the order of the recording, for the attacker who knows the defense."""
    rows = [
        r for r in read_json_lines(demo / run / "scores.jsonl") if r["attack"] == "cpl" and not r["null"] and r["knows_defense"]
    ]
    pairs = [np.asarray(Image.open(demo / run / row["pair"])) for row in sorted(rows, key=lambda row: row["case"])[:COLUMNS]]
    return [(pair[:, : pair.shape[1] // 2], pair[:, pair.shape[1] // 2 :]) for pair in pairs]


def main() -> None:
    """Draw the picture."""
    demo = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    font = ImageFont.load_default(15)
    size = (MARGIN + COLUMNS * (CELL + GAP), len(LINES) * (CELL + GAP) + GAP)
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    for line, (run, which, words) in enumerate(LINES):
        top = GAP + line * (CELL + GAP)
        draw.text((MARGIN - 10, top + CELL // 2), words, font=font, fill="black", anchor="rm")
        for column, pair in enumerate(halves(demo, run)):
            cell = Image.fromarray(pair[which != "original"]).resize((CELL, CELL), Image.Resampling.NEAREST)
            picture.paste(cell, (MARGIN + column * (CELL + GAP), top))
    picture.save(Path(__file__).with_name("reconstructions.png"), optimize=True)


if __name__ == "__main__":
    main()
