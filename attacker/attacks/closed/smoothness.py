"""What is believed of an input beside its equations, for Newton's method: smooth functions with a quadratic one above them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Curvature = Callable[[Tensor], Tensor]
"""A symmetric positive linear map of batches."""


class Belief(Protocol):
    """A convex function of x (N, *shape) in [0, 1]; lower is likelier."""

    def value(self, x: Tensor) -> Tensor:
        """(N,)."""
        ...

    def slope(self, x: Tensor) -> Tensor:
        """Its gradient, of the shape of x."""
        ...

    def curvature(self, x: Tensor) -> Curvature:
        """Of a quadratic function that touches it at x and is nowhere below it."""
        ...


@dataclass(frozen=True)
class TotalVariation:
    """Sum over values of sqrt(across^2 + down^2 + edge^2) - edge, of images (N, C, H, W), each channel for itself.

    edge: in units of x. Differences well below it cost their square, those above it their size, and everywhere it has a
    derivative. Its curvature is that of lagged diffusivity (Vogel and Oman 1996).
    """

    edge: float

    def value(self, x: Tensor) -> Tensor:
        return (self._lengths(x) - self.edge).flatten(1).sum(dim=1)

    def slope(self, x: Tensor) -> Tensor:
        return self.curvature(x)(x)

    def curvature(self, x: Tensor) -> Curvature:
        weights = 1 / self._lengths(x)

        def curve(v: Tensor) -> Tensor:
            across, down = differences(v)
            return gathered(weights * across, weights * down)

        return curve

    def _lengths(self, x: Tensor) -> Tensor:
        across, down = differences(x)
        return (across.square() + down.square() + self.edge**2).sqrt()


@dataclass(frozen=True)
class Middle:
    """Half the squared distance to 0.5: of rows, whose neighbours have nothing in common."""

    def value(self, x: Tensor) -> Tensor:
        return self.slope(x).flatten(1).square().sum(dim=1) / 2

    def slope(self, x: Tensor) -> Tensor:
        return x - 0.5

    def curvature(self, x: Tensor) -> Curvature:
        return lambda v: v


def differences(x: Tensor) -> tuple[Tensor, Tensor]:
    """To the next value across and down, each of the shape of x (..., H, W); 0 at the far edge."""
    across, down = torch.zeros_like(x), torch.zeros_like(x)
    across[..., :-1] = x[..., 1:] - x[..., :-1]
    down[..., :-1, :] = x[..., 1:, :] - x[..., :-1, :]
    return across, down


def gathered(across: Tensor, down: Tensor) -> Tensor:
    """The transpose of `differences`."""
    x = torch.zeros_like(across)
    x[..., 1:] += across[..., :-1]
    x[..., :-1] -= across[..., :-1]
    x[..., 1:, :] += down[..., :-1, :]
    x[..., :-1, :] -= down[..., :-1, :]
    return x
