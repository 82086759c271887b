"""Convex priors of inputs for Newton's method: total variation for images, distance to 0.5 for table rows.

The methods `value` and `gradient` return the prior of each example of x (N, *shape), (N,), and its gradient. `curvature` returns
the function v -> H v, where H is the Hessian of a quadratic function that touches the prior at x and is nowhere below it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.optimisers.conjugate_gradients import Curvature


@dataclass(frozen=True)
class TotalVariation:
    """Smoothed total variation of images (N, C, H, W): sum of sqrt(across^2 + down^2 + edge^2) - edge over pixels and channels.

    across and down are the differences to the next pixel to the right and below in the same channel, 0 at the border.
    edge: smoothing, in the units of the values of x. Differences well below it count quadratically, larger ones linearly, and
          the function is differentiable everywhere. The quadratic bound is that of lagged diffusivity (Vogel and Oman 1996).
    """

    edge: float

    def value(self, x: Tensor) -> Tensor:
        return (self._compute_lengths(x) - self.edge).flatten(1).sum(dim=1)

    def gradient(self, x: Tensor) -> Tensor:
        return self.curvature(x)(x)

    def curvature(self, x: Tensor) -> Curvature:
        weights = 1 / self._compute_lengths(x)

        def apply_curvature(v: Tensor) -> Tensor:
            across, down = compute_differences(v)
            return transpose_differences(weights * across, weights * down)

        return apply_curvature

    def _compute_lengths(self, x: Tensor) -> Tensor:
        across, down = compute_differences(x)
        return (across.square() + down.square() + self.edge**2).sqrt()


@dataclass(frozen=True)
class MidpointPrior:
    """Prior of table rows: half the squared Euclidean distance of each row to 0.5."""

    def value(self, x: Tensor) -> Tensor:
        return self.gradient(x).flatten(1).square().sum(dim=1) / 2

    def gradient(self, x: Tensor) -> Tensor:
        return x - 0.5

    def curvature(self, x: Tensor) -> Curvature:
        return lambda v: v


SmoothnessPrior = TotalVariation | MidpointPrior


def compute_differences(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the differences to the next value along W and along H, each of the shape of x (..., H, W). The last are 0."""
    return x.diff(dim=-1, append=x[..., -1:]), x.diff(dim=-2, append=x[..., -1:, :])


def transpose_differences(across: Tensor, down: Tensor) -> Tensor:
    """Apply the transpose of `compute_differences` to differences (..., H, W), and return images of that shape."""
    x = torch.zeros_like(across)
    x[..., 1:] += across[..., :-1]
    x[..., :-1] -= across[..., :-1]
    x[..., 1:, :] += down[..., :-1, :]
    x[..., :-1, :] -= down[..., :-1, :]
    return x
