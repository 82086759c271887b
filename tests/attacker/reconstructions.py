"""Helper that makes the result of an attack from given examples."""

from typing import Any

import torch
from torch import Tensor

from attacker.reconstruction import Reconstruction


def make_reconstruction(case: str, x: Tensor, y: Tensor, **fields: Any) -> Reconstruction:
    """Return the result of an attack of one iteration. fields: fields that differ; without `confidence`, it is 1."""
    defaults = {
        "confidence": torch.ones(len(x)), "slots": (), "loss": torch.zeros(1), "iterations": 1, "evaluations": 1, "restarts": 1,
        "seconds": 1.0, "route": "optimisation", "attack": "test", "oracles": (), "seed": 0,
    }  # fmt: skip
    return Reconstruction(case=case, x=x, y=y, **{**defaults, **fields})
