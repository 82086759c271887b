"""Gradient evaluations compiled by `torch.compile`.

Compiling takes up to a minute. For many problems, an evaluation then takes about two thirds of the time of an uncompiled one, and
for a single problem one third.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

EvaluateLoss = Callable[..., tuple[Tensor, Tensor]]
"""Maps the search variables (P, D) of P problems, and tensors with one row per problem, to a tuple: the gradients (P, D)
of the losses by the search variables, and the losses (P,) of the searches."""

MIN_SHARE = 0.6
"""Share of the problems below which the uncompiled function is used. The compiled one always computes the initial number of
problems, so that it is slower once few are left.
"""


class CompiledEvaluation:
    """A compiled version of a gradient evaluation for a fixed number of problems.

    evaluate:  the function to compile.
    otherwise: the uncompiled function, used for fewer than MIN_SHARE * size or more than `size` problems. If PyTorch finds no
               compiler or cannot compile, the uncompiled function is used for all further calls, after one warning.
    size:      number of problems of the compiled function; from MIN_SHARE * size problems on, smaller batches are padded with
               copies of the first problem. The caller gives this number, so that a search that resumes from a checkpoint computes
               bitwise the same.
    """

    def __init__(self, evaluate: EvaluateLoss, otherwise: EvaluateLoss, size: int) -> None:
        self.compiled: EvaluateLoss | None = torch.compile(evaluate, dynamic=False)
        self.otherwise, self.size = otherwise, size

    def __call__(self, z: Tensor, *rows: Any) -> tuple[Tensor, Tensor]:
        if self.compiled is None or len(z) > self.size or len(z) < MIN_SHARE * self.size:
            return self.otherwise(z, *rows)
        missing = self.size - len(z)

        def pad(t: Tensor) -> Tensor:
            return torch.cat([t, t[:1].expand(missing, *t.shape[1:])]) if missing else t

        try:
            slope, value = self.compiled(*tree_map(pad, (z.detach(), *rows)))
        except (RuntimeError, ImportError, OSError) as error:
            warnings.warn(f"not compiled, which is slower: {str(error).strip().splitlines()[0]}", stacklevel=2)
            self.compiled = None
            return self.otherwise(z, *rows)
        return slope[: len(z)], value[: len(z)]
