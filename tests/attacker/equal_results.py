"""Helpers that compare the results of two replays."""

from pathlib import Path

import torch

from attacker.reconstruction import Reconstruction


def answers(folder: Path) -> dict[str, Reconstruction]:
    return {path.name: Reconstruction.read(path) for path in sorted(folder.glob("*.safetensors"))}


def check_equal(folder: Path, other: Path) -> None:
    """Assert that the results in two folders are bitwise equal, except for times."""
    mine, theirs = answers(folder), answers(other)
    assert list(mine) == list(theirs)
    assert mine
    for name, answer in mine.items():
        for part in ("x", "y", "loss", "confidence"):
            own, other = (getattr(one, part).nan_to_num(nan=-1.0) for one in (answer, theirs[name]))  # NaN: undecided confidence
            assert torch.equal(own, other), (name, part)
