"""Over what a defense takes its norms and its ranks: each tensor on its own, or the whole update as one vector."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor

from defenses.base import Update

Scope = Literal["tensor", "global"]

Mask = Mapping[str, Tensor]
"""Truth values in the shape of an update, by parameter name."""


def check_scope(name: str, scope: str) -> None:
    """Raises ValueError, naming the defense, where `scope` is none."""
    if scope not in get_args(Scope):
        raise ValueError(f"{name}: scope must be 'tensor' or 'global', got {scope!r}")


def masks(update: Update, scope: Scope, choose: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Ask `choose`, from a vector (n,) to truth values (n,), for every tensor or once for all of them.

    Names are taken in alphabetical order, whatever the order of `update`: what is drawn belongs to names.
    """
    names = sorted(update)
    if scope == "tensor":
        return {name: choose(update[name].flatten()).reshape(update[name].shape) for name in names}
    chosen = choose(torch.cat([update[name].flatten() for name in names]))
    parts = torch.split(chosen, [update[name].numel() for name in names])
    return {name: part.reshape(update[name].shape) for name, part in zip(names, parts, strict=True)}


def magnitudes(values: Tensor) -> Tensor:
    """Absolute values to rank by; what is not a number ranks highest, so that it is seen and not dropped."""
    return values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)


def kth_largest(magnitudes: Tensor, k: int) -> Tensor:
    """The k-th largest of (n,) values, 1 <= k <= n; a 0-d tensor."""
    return torch.kthvalue(magnitudes, magnitudes.numel() - k + 1).values


def exact_share(share: float, count: int) -> Fraction:
    """`share * count` of the decimal number that was written: 0.1 of 30 is 3, and in floating point more than that."""
    return Fraction(str(float(share))) * count
