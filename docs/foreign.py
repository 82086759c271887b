"""Makes docs/foreign.png: a Flower app that knows nothing of fedleak, recorded in two ways, and what an attack gets out of that.

The app is the one in tests/foreign/quickstart. Sixteen clients take one step on one photograph each; those shown are the last
eight, on other photographs than the attack's settings were chosen on.
"""

import logging
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp.strategy import FedAvg
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from attacker.attacks import AttackSpec
from attacker.commands.progress_bar import replay_with_progress
from attacker.reconstruction import Reconstruction
from fedsim.client import update_mod
from fedsim.engine import engines as engine
from fedsim.recording import DataSpec, Recording, Training
from fedsim.server import record

ROOT = Path(__file__).parents[1]
CLIENTS, SHOWN, RATE = 16, 8, 0.05
CELL, GAP, MARGIN = 96, 6, 230
DEFENSE = "clip(1) | gaussian(0.001)"
WAYS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "its strategy recorded": ("", ()),
    "and update_mod()": ("", (update_mod(),)),
    f"{DEFENSE}": (DEFENSE, (update_mod(DEFENSE),)),
}
ARGUMENTS = {"steps": 2000, "signed": False, "tv": 0.03}


def owner_of(owners: dict[str, int]) -> Callable[..., Message]:
    """A mod that writes down which client trains on which part of the data: truth, for the captions alone."""

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        identity = context.state.config_records.get("identity", {"pseudonym": context.node_id})
        owners[str(identity["pseudonym"])] = int(context.node_config["partition-id"])
        return reply

    return mod


def federate(folder: Path, defense: str, mods: tuple[Any, ...]) -> dict[int, str]:
    """Run and record the app; returns the client of each part of the data."""
    import client_app
    import server_app

    random.seed(0)
    strategy = record(
        FedAvg(fraction_evaluate=0.0),
        folder,
        model="task:Net",
        training=Training(learning_rate=RATE, batch_size=1, steps=1),
        data=DataSpec(shape=(3, 32, 32), num_classes=10, mean=(0.5,) * 3, std=(0.5,) * 3),
        defense=defense,
    )
    owners: dict[str, int] = {}
    clients = client_app.make_app(mods=[owner_of(owners), *mods])
    engine.run_local(server_app.make_app(strategy, rounds=1, lr=RATE, seed=2), clients, CLIENTS)
    return {partition: client for client, partition in owners.items()}


def attack(folder: Path, clients: dict[int, str], *, null: bool = False) -> list[Tensor]:
    """Reconstructions (3, 32, 32) of the clients shown, in [0, 1]."""
    recording, names = Recording(folder / "recording"), [clients[i] for i in range(CLIENTS - SHOWN, CLIENTS)]
    spec = AttackSpec(name="inverting_gradients", arguments=ARGUMENTS, null=null)
    replayed = replay_with_progress(recording, spec, folder / "reconstructions", clients=frozenset(names))
    return [Reconstruction.read(replayed.folder / f"00001-{name}.safetensors").x[0].clamp(0, 1) for name in names]


def psnr(x: Tensor, original: Tensor) -> float:
    return float(-10 * (x - original).square().mean().log10())


def picture(lines: dict[str, list[Tensor]]) -> Image.Image:
    """One line of images for each entry, its name at the left."""
    made = Image.new("RGB", (MARGIN + SHOWN * (CELL + GAP), len(lines) * (CELL + GAP) + GAP), "white")
    draw, font = ImageDraw.Draw(made), ImageFont.load_default(15)
    for line, (words, images) in enumerate(lines.items()):
        top = GAP + line * (CELL + GAP)
        draw.text((MARGIN - 10, top + CELL // 2), words, font=font, fill="black", anchor="rm")
        for column, x in enumerate(images):
            cell = Image.fromarray((x * 255).round().byte().permute(1, 2, 0).numpy())
            made.paste(cell.resize((CELL, CELL), Image.Resampling.NEAREST), (MARGIN + column * (CELL + GAP), top))
    return made


def main() -> None:
    """Run, attack, print PSNR and draw."""
    sys.path.insert(0, str(ROOT / "tests" / "foreign" / "quickstart"))
    import task

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/foreign")
    shutil.rmtree(folder, ignore_errors=True)
    parts = [task.load_data(i, CLIENTS, 1, 1)[0].dataset.tensors[0][0] for i in range(CLIENTS - SHOWN, CLIENTS)]
    originals = [x / 2 + 0.5 for x in parts]
    lines = {"private image": originals}
    for number, (words, (defense, mods)) in enumerate(WAYS.items()):
        clients = federate(folder / str(number), defense, mods)
        for null in (False, True):
            found = attack(folder / str(number), clients, null=null)
            scores = [psnr(x, original) for x, original in zip(found, originals, strict=True)]
            print(f"{words}{', null' if null else ''}: {sum(scores) / SHOWN:.1f} dB,", *(f"{score:.1f}" for score in scores))
            if not null:
                lines[words] = found
    picture(lines).save(Path(__file__).with_suffix(".png"), optimize=True)


if __name__ == "__main__":
    main()
