"""Activations as R-GAP uses them: forwards, backwards from their output, and their slope there."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EDGE = 1e-12
"""How near a sigmoid's output may come to 0 or 1 before its inverse is cut off."""


@dataclass(frozen=True)
class Activation:
    """An elementwise monotonic function.

    forward: from pre-activations z to outputs f. inverse: from f to z; slope: from f to the derivative at z.
    bend:    from f to the derivative of the slope by f, 0 where pieces are straight.
    known:   from f, where z can be told: everywhere but for the zeros of ReLU, which remove a constraint (R-GAP, section 3.1.2).
    bounds:  of the outputs that exist.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    bend: Callable[[Tensor], Tensor] = torch.zeros_like
    known: Callable[[Tensor], Tensor] = torch.ones_like
    bounds: tuple[float, float] = (-float("inf"), float("inf"))
    smooth: bool = True


def _inside(f: Tensor, low: float, high: float) -> Tensor:
    return f.clamp(low + EDGE, high - EDGE)


def leaky_relu(slope: float) -> Activation:
    """max(z, slope z), of a positive slope."""

    def slope_at(f: Tensor) -> Tensor:
        return torch.where(f >= 0, torch.ones_like(f), torch.full_like(f, slope))

    return Activation(
        name=f"leaky_relu({slope:g})",
        forward=lambda z: torch.where(z >= 0, z, slope * z),
        inverse=lambda f: f / slope_at(f),
        slope=slope_at,
        smooth=False,
    )


IDENTITY = Activation("identity", forward=lambda z: z, inverse=lambda f: f, slope=torch.ones_like)
RELU = Activation(
    "relu",
    forward=lambda z: z.clamp(min=0),
    inverse=lambda f: f.clamp(min=0),
    slope=lambda f: (f > 0).to(f.dtype),
    known=lambda f: (f > 0).to(f.dtype),
    bounds=(0.0, float("inf")),
    smooth=False,
)
SIGMOID = Activation(
    "sigmoid",
    forward=torch.sigmoid,
    inverse=lambda f: torch.logit(_inside(f, 0, 1)),
    slope=lambda f: (lambda g: g * (1 - g))(_inside(f, 0, 1)),
    bend=lambda f: 1 - 2 * f,
    bounds=(0.0, 1.0),
)
TANH = Activation(
    "tanh",
    forward=torch.tanh,
    inverse=lambda f: torch.atanh(_inside(f, -1, 1)),
    slope=lambda f: 1 - _inside(f, -1, 1).square(),
    bend=lambda f: -2 * f,
    bounds=(-1.0, 1.0),
)

DEAD = 4.0
"""An output of a ReLU within so many times the rounding of its neighbours is a zero."""


def settled(activation: Activation, f: Tensor) -> Tensor:
    """Outputs f (N, ...) as they were solved for, with the zeros of a ReLU as zeros: those below 0 tell how far rounding goes."""
    if activation is not RELU:
        return f
    rounding = (-f).flatten(1).amax(dim=1).clamp(min=0).reshape(-1, *[1] * (f.ndim - 1))
    return torch.where(f > DEAD * rounding, f, 0)
