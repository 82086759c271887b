"""Makes docs/defended.png: what is recovered under some defenses, ignoring and knowing them. Ten minutes on two cores.

Eight clients with a photograph each, one step of batch 1 on the CPL LeNet; the first six of the recording, unselected.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from attacker.attacks import AttackSpec
from attacker.replay.replay import Replay
from attacker.scoring import Scorer
from fedsim.config.experiment import validate
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording

COLUMNS, CELL, GAP, MARGIN = 6, 96, 6, 330
FEDERATION: dict[str, Any] = {
    "rounds": 1,
    "model": "lenet_cpl",
    "data": {"name": "photos", "size": 32},
    "clients": {"count": 8},
    "training": {"learning_rate": 0.01, "batch_size": 1, "steps": 1},
}
CPL = AttackSpec(name="cpl", arguments={"restarts": 2})
INVERTING = AttackSpec(name="inverting_gradients", arguments={"steps": 1600, "signed": False, "tv": 1e-3})
LINES: tuple[tuple[dict[str, str], AttackSpec], ...] = (
    ({}, INVERTING),
    ({"defense": "top_k(0.1)"}, INVERTING),
    ({"defense": "clip(0.01)"}, CPL),
    ({"gradient": "soteria(prune=0.8)"}, CPL),
    ({"defense": "gaussian(snr_db=0)"}, INVERTING),
)

Line = tuple[str, list[np.ndarray]]


def main() -> None:
    """Run the federations, attack them, and draw the picture."""
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (defense, attack) in enumerate(LINES):
            run = FederationRun(
                experiment=validate({**FEDERATION, **defense}, source="docs"), out=Path(folder) / str(i), client_seed=0
            )
            engine.run(run, engine="local")
            words = next(iter(defense.values()), "no defense")
            for knows in (False, True) if defense else (True,):
                originals, found, psnr = attacked(run, attack, knows=knows)
                lines += [("private image", originals)] if not lines else []
                told = f"{words}, {'known' if knows else 'ignored'}" if defense else words
                lines.append((f"{told}: {psnr:.1f} dB", found))
                print(lines[-1][0], flush=True)
    draw(lines).save(Path(__file__).with_name("defended.png"), optimize=True)


def attacked(run: FederationRun, attack: AttackSpec, *, knows: bool) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Originals and reconstructions of the first examples, and the mean PSNR of all."""
    spec = AttackSpec(name=attack.name, arguments={**attack.arguments, "knows_defense": knows})
    replayed = Replay(recording=Recording(run.out / "recording"), spec=spec, out=run.out / "reconstructions").run()
    rows = sorted(Scorer(run.out, [run.out / "truth"]).score(replayed.folder), key=lambda row: row.case)
    pairs = [np.asarray(Image.open(run.out / row.pair)) for row in rows[:COLUMNS]]
    middle = pairs[0].shape[1] // 2
    psnr = sum(row.psnr for row in rows) / len(rows)
    return [pair[:, :middle] for pair in pairs], [pair[:, middle:] for pair in pairs], psnr


def draw(lines: list[Line]) -> Image.Image:
    """One line of images for each, with its words before it."""
    font = ImageFont.load_default(15)
    picture = Image.new("RGB", (MARGIN + COLUMNS * (CELL + GAP), len(lines) * (CELL + GAP) + GAP), "white")
    pen = ImageDraw.Draw(picture)
    for i, (words, images) in enumerate(lines):
        top = GAP + i * (CELL + GAP)
        pen.text((MARGIN - 10, top + CELL // 2), words, font=font, fill="black", anchor="rm")
        for column, image in enumerate(images):
            cell = Image.fromarray(image).resize((CELL, CELL), Image.Resampling.NEAREST)
            picture.paste(cell, (MARGIN + column * (CELL + GAP), top))
    return picture


if __name__ == "__main__":
    main()
