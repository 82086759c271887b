"""Draw docs/reconstructions.png from a finished `make demo`: private photographs and what an attack recovered of them."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fedsim.recording.files import read_json_lines

NUM_COLUMNS, CELL_PIXELS, GAP_PIXELS, MARGIN_PIXELS = 8, 75, 6, 300
Line = tuple[str, str, Mapping[str, Any], str]
PICTURE_LINES: tuple[Line, ...] = (
    ("single", "original", {"attack": "cpl"}, "private photographs"),
    ("single", "recovered", {"attack": "cpl"}, "recovered from one update each"),
    ("compressed", "recovered", {"knows_defense": False}, "top_k(0.1), attacker ignores it"),
    ("compressed", "recovered", {"knows_defense": True}, "top_k(0.1), attacker knows it"),
    ("batches", "original", {}, "private photographs, batches of eight"),
    ("batches", "recovered", {}, "recovered from two steps on them"),
    ("noisy", "recovered", {"knows_defense": True}, "with clip and noise, attacker knows it"),
)
"""Run, which half of a pair, what the rows of the attack must hold, and the words beside the line."""


def read_pairs(demo: Path, run: str, wanted: Mapping[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return pairs (original, reconstruction) of pixels for the first `NUM_COLUMNS` examples of an attack, sorted by case.

    demo: folder of the finished demo. run: name of a run in it. wanted: what the rows of the attack in scores.jsonl must hold.
    """
    wanted = {"null": False, **wanted}
    rows = [row for row in read_json_lines(demo / run / "scores.jsonl") if wanted.items() <= row.items()]
    pairs = [np.asarray(Image.open(demo / run / row["pair"])) for row in sorted(rows, key=lambda row: row["case"])[:NUM_COLUMNS]]
    return [(pair[:, : pair.shape[1] // 2], pair[:, pair.shape[1] // 2 :]) for pair in pairs]


def main() -> None:
    """Draw the picture."""
    demo = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    font = ImageFont.load_default(15)
    size = (
        MARGIN_PIXELS + NUM_COLUMNS * (CELL_PIXELS + GAP_PIXELS),
        len(PICTURE_LINES) * (CELL_PIXELS + GAP_PIXELS) + GAP_PIXELS,
    )
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    for line, (run, which, wanted, words) in enumerate(PICTURE_LINES):
        top = GAP_PIXELS + line * (CELL_PIXELS + GAP_PIXELS)
        draw.text((MARGIN_PIXELS - 10, top + CELL_PIXELS // 2), words, font=font, fill="black", anchor="rm")
        for column, pair in enumerate(read_pairs(demo, run, wanted)):
            cell = (
                Image.fromarray(pair[which != "original"])
                .convert("RGB")
                .resize((CELL_PIXELS, CELL_PIXELS), Image.Resampling.NEAREST)
            )
            picture.paste(cell, (MARGIN_PIXELS + column * (CELL_PIXELS + GAP_PIXELS), top))
    picture.save(Path(__file__).with_name("reconstructions.png"), optimize=True)


if __name__ == "__main__":
    main()
