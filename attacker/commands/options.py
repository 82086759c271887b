"""Options that several commands share, and functions that check the values of options."""

import re
from pathlib import Path
from typing import Annotated

import typer

UNITS = {"s": 1, "m": 60, "h": 3600}
AttackArguments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An argument of the attack; may be repeated.")
]
OwnModel = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="Function that builds the network, if it is not built into fedsim; its module is imported.",
    ),
]
TruthFolders = Annotated[
    list[Path] | None,
    typer.Option(help="Folder of truth, in which a client lists the examples it used; by default the run's; may be repeated."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA if it is available.")]


def resolve_device(name: str) -> str:
    """Return the PyTorch device for a value of `--device`: "auto", "cpu", or a name that begins with "cuda".

    Raises ValueError for other values, and for "cuda" if PyTorch finds no CUDA; whether a numbered GPU exists is not checked.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not name.startswith("cuda"):
        raise ValueError(f"--device must be auto, cpu, cuda, or cuda with a number, such as cuda:1; got {name!r}")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {name!r} is not available on this machine, on which PyTorch finds no CUDA; use cpu")
    return name


def check_takes(attack: str, argument: str, owner: str) -> None:
    """Raise ValueError if the attack has no argument named `argument`, which an option sets. owner: an attack that has it."""
    from inspect import signature

    from attacker.attacks import ATTACKS

    if argument not in signature(ATTACKS[attack]).parameters:
        raise ValueError(f"--{argument} is an option of the attack {owner}, and {attack} does not have it; leave it out")


def resolve_truth(run: Path, truth: list[Path] | None) -> list[Path]:
    """Return the folders of truth: the given ones, or the run's own. Raises ValueError if there is neither."""
    if not truth and not (run / "truth").exists():
        raise ValueError(
            f"{run} has no folder truth, which clients of fedsim write and an app that records itself does not: give the "
            "clients' truth with --truth FOLDER, write it with fedleak.write_truth (docs/tutorials/flower-app.md), or show the "
            f"reconstructions without scores: attacker report {run}"
        )
    return truth or [run / "truth"]


def parse_duration(option: str, text: str) -> float:
    """Return the seconds of a positive duration such as 90s, 10m or 1.5h. For other text, raises ValueError naming the option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{option} {text!r} is not a positive time: write it as 90s, 10m or 2h")
    return float(match[1]) * UNITS[match[2]]
