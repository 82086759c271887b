"""Scopes of norms and ranks: each tensor separately, or the whole update as one vector."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor

from defenses.base import Update

Scope = Literal["tensor", "global"]

Mask = Mapping[str, Tensor]
"""Boolean tensors in the shape of an update, by parameter name."""


def check_scope(name: str, scope: str) -> None:
    """Raise ValueError, naming the defense, if `scope` is unknown."""
    if scope not in get_args(Scope):
        raise ValueError(f"{name}: scope must be 'tensor' or 'global', got {scope!r}")


def masks(update: Update, scope: Scope, choose: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Apply `choose`, which maps a vector (n,) to booleans (n,), to every tensor or once to all of them concatenated.

    Tensors are processed in alphabetical order, so that random draws belong to names and not to the order of `update`.
    """
    names = sorted(update)
    if scope == "tensor":
        return {name: choose(update[name].flatten()).reshape(update[name].shape) for name in names}
    chosen = choose(torch.cat([update[name].flatten() for name in names]))
    parts = torch.split(chosen, [update[name].numel() for name in names])
    return {name: part.reshape(update[name].shape) for name, part in zip(names, parts, strict=True)}


def magnitudes(values: Tensor) -> Tensor:
    """Return absolute values for ranking. NaN ranks highest, so that it is sent and noticed."""
    return values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)


def kth_largest(magnitudes: Tensor, k: int) -> Tensor:
    """Return the k-th largest of (n,) values as a 0-d tensor; 1 <= k <= n."""
    return torch.kthvalue(magnitudes, magnitudes.numel() - k + 1).values


def exact_share(share: float, count: int) -> Fraction:
    """Return `share * count` computed with the decimal number as written: 0.1 * 30 is 3, which floats exceed."""
    return Fraction(str(float(share))) * count
