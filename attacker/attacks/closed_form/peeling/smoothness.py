"""Smoothness priors of inputs for Newton's method.

Each is differentiable, and gives at every point a quadratic function that bounds it from above, which a Newton step minimises."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Curvature = Callable[[Tensor], Tensor]
"""A symmetric positive semidefinite linear map of batches (N, *shape), such as a Hessian."""


class SmoothnessPrior(Protocol):
    """Protocol of a convex prior of x (N, *shape) in [0, 1]; a lower value is likelier."""

    def value(self, x: Tensor) -> Tensor:
        """Return the value of the prior for each example of x, (N,)."""
        ...

    def gradient(self, x: Tensor) -> Tensor:
        """Return the gradient of the prior at x, of the shape of x."""
        ...

    def curvature(self, x: Tensor) -> Curvature:
        """Return the multiplication by the Hessian of a quadratic upper bound of the prior that touches it at x."""
        ...


@dataclass(frozen=True)
class TotalVariation:
    """Smoothed total variation of images (N, C, H, W): the sum of sqrt(across^2 + down^2 + edge^2) - edge over all pixels.

    across and down are the differences to neighbouring pixels of the same channel.
    edge: smoothing in units of x. Differences well below it count quadratically, larger ones linearly, and the function is
          differentiable everywhere. The quadratic bound is that of lagged diffusivity (Vogel and Oman 1996).
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
class Middle:
    """Prior of table rows: half the squared distance to 0.5."""

    def value(self, x: Tensor) -> Tensor:
        return self.gradient(x).flatten(1).square().sum(dim=1) / 2

    def gradient(self, x: Tensor) -> Tensor:
        return x - 0.5

    def curvature(self, x: Tensor) -> Curvature:
        return lambda v: v


def compute_differences(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return differences to the next value across and down, each of the shape of x (..., H, W); 0 at the far edge."""
    across, down = torch.zeros_like(x), torch.zeros_like(x)
    across[..., :-1] = x[..., 1:] - x[..., :-1]
    down[..., :-1, :] = x[..., 1:, :] - x[..., :-1, :]
    return across, down


def transpose_differences(across: Tensor, down: Tensor) -> Tensor:
    """Apply the transpose of `compute_differences`, and return the result in the shape of the images."""
    x = torch.zeros_like(across)
    x[..., 1:] += across[..., :-1]
    x[..., :-1] -= across[..., :-1]
    x[..., 1:, :] += down[..., :-1, :]
    x[..., :-1, :] -= down[..., :-1, :]
    return x
