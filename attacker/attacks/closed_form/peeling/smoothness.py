"""Priors of inputs for Newton's method: differentiable functions with a quadratic upper bound, and a covariance of images."""

from collections.abc import Callable
from dataclasses import dataclass
from math import pi
from typing import Protocol

import torch
from torch import Tensor

from fedsim.recording.observation import DataSpec

Curvature = Callable[[Tensor], Tensor]
"""A symmetric positive semidefinite linear map of batches (N, *shape), such as a Hessian."""
Spread = Callable[[Tensor], Tensor]
"""A symmetric square root of a covariance, as a linear map of batches (..., *shape)."""

PIXEL_DEVIATION = 0.25
"""Standard deviation of the pixels of an image."""
SPECTRAL_DECAY = 1.5
"""Exponent of the squared frequency in the decay of the variance of images; about 1 for photographs."""
CUTOFF_FREQUENCY = 0.01
"""Squared frequency below which the variance is constant."""
COLOUR_VARIANCE = 0.1
"""Variance of differences between channels, relative to the variance of their mean."""


class SmoothnessPrior(Protocol):
    """Protocol of a convex prior of x (N, *shape) in [0, 1]; a lower value is likelier."""

    def value(self, x: Tensor) -> Tensor:
        """Return the value of each x, (N,)."""
        ...

    def slope(self, x: Tensor) -> Tensor:
        """Return the gradient at x, of the shape of x."""
        ...

    def curvature(self, x: Tensor) -> Curvature:
        """Return the Hessian of a quadratic upper bound that touches the function at x."""
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
    """Prior of table rows: half the squared distance to 0.5."""

    def value(self, x: Tensor) -> Tensor:
        return self.slope(x).flatten(1).square().sum(dim=1) / 2

    def slope(self, x: Tensor) -> Tensor:
        return x - 0.5

    def curvature(self, x: Tensor) -> Curvature:
        return lambda v: v


def differences(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return differences to the next value across and down, each of the shape of x (..., H, W); 0 at the far edge."""
    across, down = torch.zeros_like(x), torch.zeros_like(x)
    across[..., :-1] = x[..., 1:] - x[..., :-1]
    down[..., :-1, :] = x[..., 1:, :] - x[..., :-1, :]
    return across, down


def gathered(across: Tensor, down: Tensor) -> Tensor:
    """Apply the transpose of `differences`, and return the result in the shape of the images."""
    x = torch.zeros_like(across)
    x[..., 1:] += across[..., :-1]
    x[..., :-1] -= across[..., :-1]
    x[..., 1:, :] += down[..., :-1, :]
    x[..., :-1, :] -= down[..., :-1, :]
    return x


def smooth_spread(data: DataSpec, dtype: torch.dtype, device: torch.device) -> Spread:
    """Return a square root of the prior covariance of examples, as a linear map of batches.

    For images the covariance is diagonal in the cosine transform of each channel, decreases with the frequency, and correlates
    channels. For rows of a table it is a multiple of the identity.
    dtype: data type of the stored transform; it is converted to that of the argument.
    """
    if not data.is_image:
        return lambda x: PIXEL_DEVIATION * x
    down, across = (_cosines(size).to(dtype=dtype, device=device) for size in data.shape[1:])
    frequency = sum(
        (2 - 2 * torch.cos(pi * torch.arange(size, dtype=torch.float64) / size)).reshape(shape)
        for size, shape in zip(data.shape[1:], ((-1, 1), (1, -1)), strict=True)
    )
    root = (frequency + CUTOFF_FREQUENCY) ** (-SPECTRAL_DECAY / 2)
    root = (PIXEL_DEVIATION * root / root.square().mean().sqrt()).to(dtype=dtype, device=device)

    def spread(x: Tensor) -> Tensor:
        low, middle, wide = (t.to(x.dtype) for t in (down, root, across))
        common = x.mean(dim=-3, keepdim=True)
        weighed = middle * (low @ (common + COLOUR_VARIANCE**0.5 * (x - common)) @ wide.T)
        spread_out: Tensor = low.T @ weighed @ wide
        return spread_out

    return spread


def _cosines(size: int) -> Tensor:
    """Return the matrix (size, size) of the orthonormal discrete cosine transform (DCT-II)."""
    k, i = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)[None]
    rows: Tensor = torch.cos(pi * (i + 0.5) * k / size) * (2 / size) ** 0.5
    rows[0] /= 2**0.5
    return rows
