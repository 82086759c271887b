"""The covariance of a Gaussian distribution of smooth images, which serves in priors, starts and a latent space of searches."""

from collections.abc import Callable
from math import pi

import torch
from torch import Tensor

from fedsim.recording.observation import DataSpec

Spread = Callable[[Tensor], Tensor]
"""A symmetric square root of a covariance, or its inverse, as a linear map of batches (..., *shape)."""

PIXEL_DEVIATION = 0.25
"""Standard deviation of the pixels of an image."""
SPECTRAL_DECAY = 1.5
"""Exponent a of the prior's spectrum: the variance at frequency f is proportional to (f^2)^-a. For photographs a is about 1."""
CUTOFF_FREQUENCY = 0.01
"""Squared frequency that is added to f^2 in the spectrum, so that the variance is nearly constant at lower frequencies."""
COLOUR_VARIANCE = 0.1
"""Variance of differences between channels, relative to the variance of the mean over channels."""


def build_smooth_spread(
    data: DataSpec, *, inverse: bool = False, decay: float | None = None, colour_variance: float | None = None
) -> Spread:
    """Return a function that multiplies images (..., *shape) by a symmetric square root of the covariance of smooth images.

    The covariance is diagonal in the cosine transform of each channel, is larger for lower frequencies, and correlates channels.
    For table rows, all values are independent with equal variance.
    inverse: return the multiplication by the inverse of this root.
    decay, colour_variance: used in place of SPECTRAL_DECAY and COLOUR_VARIANCE; None for the constants.
    """
    decay = SPECTRAL_DECAY if decay is None else decay
    colour_variance = COLOUR_VARIANCE if colour_variance is None else colour_variance
    power = -1 if inverse else 1
    if not data.is_image:
        return lambda x: PIXEL_DEVIATION**power * x
    down, across = (_build_cosines(size) for size in data.shape[1:])
    frequency = sum(
        (2 - 2 * torch.cos(pi * torch.arange(size, dtype=torch.float64) / size)).reshape(shape)
        for size, shape in zip(data.shape[1:], ((-1, 1), (1, -1)), strict=True)
    )
    root = (frequency + CUTOFF_FREQUENCY) ** (-decay / 2)
    root = (PIXEL_DEVIATION * root / root.square().mean().sqrt()) ** power
    colour = colour_variance ** (power / 2)

    def spread(x: Tensor) -> Tensor:
        low, middle, wide = (t.to(device=x.device, dtype=x.dtype) for t in (down, root, across))
        common = x.mean(dim=-3, keepdim=True)
        weighed = middle * (low @ (common + colour * (x - common)) @ wide.T)
        result: Tensor = low.T @ weighed @ wide
        return result

    return spread


def _build_cosines(size: int) -> Tensor:
    """Return the matrix (size, size) of the orthonormal discrete cosine transform (DCT-II), with one cosine per row."""
    k, i = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)[None]
    rows: Tensor = torch.cos(pi * (i + 0.5) * k / size) * (2 / size) ** 0.5
    rows[0] /= 2**0.5
    return rows
