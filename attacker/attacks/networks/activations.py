"""Activation functions with their inverses and derivatives, as R-GAP and the explicit gradient formulas use them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

SATURATION_MARGIN = 1e-12
"""Outputs of sigmoid and tanh are clamped to at least this distance from the ends of the function's range before inversion."""


@dataclass(frozen=True)
class Activation:
    """An elementwise monotonic activation function f(z). All derivatives are functions of the output f.

    forward: maps pre-activations z to outputs f. slope: maps f to df/dz.
    inverse: maps f to z; outputs of sigmoid and tanh are first clamped away from the ends of their range (SATURATION_MARGIN).
    bend:    maps f to the derivative of the slope by f; 0 for piecewise linear functions.
    known:   maps f to 1 where z can be computed from f and to 0 elsewhere. It is 0 only at the zeros of ReLU, for which R-GAP has
             no equation (R-GAP, section 3.1.2).
    bounds:  infimum and supremum of the outputs.
    smooth:  whether the function has derivatives of all orders everywhere, without a kink.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    bend: Callable[[Tensor], Tensor] = torch.zeros_like
    known: Callable[[Tensor], Tensor] = torch.ones_like
    bounds: tuple[float, float] = (-float("inf"), float("inf"))
    smooth: bool = True


def _clamp_inside(f: Tensor, low: float) -> Tensor:
    return f.clamp(low + SATURATION_MARGIN, 1 - SATURATION_MARGIN)


@lru_cache
def leaky_relu(slope: float) -> Activation:
    """Return the leaky ReLU whose slope is `slope`, a positive number, for negative z, and 1 elsewhere."""

    def compute_slope(f: Tensor) -> Tensor:
        return torch.where(f >= 0, torch.ones_like(f), torch.full_like(f, slope))

    return Activation(
        name=f"leaky_relu({slope:g})",
        forward=lambda z: torch.where(z >= 0, z, slope * z),
        inverse=lambda f: f / compute_slope(f),
        slope=compute_slope,
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
    inverse=lambda f: torch.logit(_clamp_inside(f, 0)),
    slope=lambda f: (lambda g: g * (1 - g))(_clamp_inside(f, 0)),
    bend=lambda f: 1 - 2 * f,
    bounds=(0.0, 1.0),
)
TANH = Activation(
    "tanh",
    forward=torch.tanh,
    inverse=lambda f: torch.atanh(_clamp_inside(f, -1)),
    slope=lambda f: 1 - _clamp_inside(f, -1).square(),
    bend=lambda f: -2 * f,
    bounds=(-1.0, 1.0),
)

ZERO_TOLERANCE = 4.0
"""An output of a ReLU counts as zero up to this multiple of the estimated numerical error."""


def settle_zeros(activation: Activation, f: Tensor) -> Tensor:
    """Return outputs (N, ...) of a ReLU with those that are zero up to numerical errors set to 0; other activations' unchanged.

    f: outputs that were computed by solving equations. For each example, the magnitude of the most negative output estimates the
       numerical error; outputs up to ZERO_TOLERANCE times this error are set to zero, negative ones included.
    """
    if activation is not RELU:
        return f
    rounding = (-f).flatten(1).amax(dim=1).clamp(min=0).reshape(-1, *[1] * (f.ndim - 1))
    return torch.where(f > ZERO_TOLERANCE * rounding, f, 0)
