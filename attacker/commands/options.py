"""Options that commands share, and checks of what they are given."""

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An argument of the attack.")]


def device_of(wanted: str) -> str:
    """The device that `--device` means. Raises ValueError where this machine has none of the kind."""
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted != "cpu" and not (wanted.startswith("cuda") and torch.cuda.is_available()):
        raise ValueError(f"--device {wanted!r} is not to be had here; use cpu")
    return wanted


def check_takes_route(attack: str) -> None:
    """Raises ValueError where an attack has no routes to choose among."""
    from inspect import signature

    from attacker.attacks import ATTACKS

    if "route" not in signature(ATTACKS[attack]).parameters:
        raise ValueError(f"--route chooses among the routes of the attack exact, and {attack} has none")


def truth_of(run: Path, given: list[Path] | None) -> list[Path]:
    """Folders of truth. Raises ValueError where none is given and the run has none of its own."""
    if not given and not (run / "truth").exists():
        raise ValueError(
            f"{run} has no truth of its own: name that of the clients with --truth FOLDER; "
            f"what was reconstructed is shown without it by: attacker report {run}"
        )
    return given or [run / "truth"]
