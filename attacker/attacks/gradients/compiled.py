"""Evaluations compiled by PyTorch: up to a minute at first, and then two thirds of the time for many, a third for one."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Evaluate = Callable[..., tuple[Tensor, Tensor]]
"""From latents (P, D), and what belongs to their problems in rows, gradients (P, D) and values (P,)."""

LEAST = 0.6
"""Share of the problems below which the rest is evaluated as it is: a compiled evaluation takes as long as at first, and that is
two thirds of the time where there are many.
"""


class Compiled:
    """`evaluate`, compiled for `size` problems; fewer are made up for by copies of the first.

    So that a search which goes on after it was killed computes what it would have, `size` is known before.

    Where PyTorch finds no compiler, or cannot compile it, that is warned of once, and `otherwise` takes over.
    """

    def __init__(self, evaluate: Evaluate, otherwise: Evaluate, size: int) -> None:
        self.compiled: Evaluate | None = torch.compile(evaluate, dynamic=False)
        self.otherwise, self.size = otherwise, size

    def __call__(self, z: Tensor, *rows: Any) -> tuple[Tensor, Tensor]:
        if self.compiled is None or len(z) > self.size or len(z) < LEAST * self.size:
            return self.otherwise(z, *rows)
        missing = self.size - len(z)
        try:
            slope, value = self.compiled(*tree_map(lambda t: _filled(t, missing), (z.detach(), *rows)))
        except (RuntimeError, ImportError, OSError) as error:
            warnings.warn(f"not compiled: {str(error).strip().splitlines()[0]}", stacklevel=2)
            self.compiled = None
            return self.otherwise(z, *rows)
        return slope[: len(z)], value[: len(z)]


def _filled(t: Tensor, missing: int) -> Tensor:
    return torch.cat([t, t[:1].expand(missing, *t.shape[1:])]) if missing else t
