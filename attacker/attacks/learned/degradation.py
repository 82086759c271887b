"""Random degradations of images that imitate those of reconstructions from gradients (Yue et al. 2022, section 4.2)."""

from typing import Literal, cast

import torch
from torch import Generator, Tensor
from torch.nn.functional import interpolate
from torchvision.transforms.functional import gaussian_blur

FACTORS = (1, 2, 4)
"""Ratios of the sides of an image and of the small image that is enlarged."""
MAX_LATENT_NOISE = 0.12
"""Largest standard deviation of the noise on the small image."""
MAX_PIXEL_NOISE = 0.05
"""Largest standard deviation of the noise on the large image."""
MAX_BLUR = 1.0
"""Largest standard deviation of the blur, in pixels."""
MAX_DENOISED = 0.3
"""Largest standard deviation of the noise that a denoiser is trained to remove."""
SKIPPED = 0.5
"""Probability with which each degradation is left out."""
SHRINKERS = ("nearest", "bilinear", "bicubic", "area")

Shrinker = Literal["nearest", "bilinear", "bicubic", "area"]


def degrade(x: Tensor, rng: Generator) -> Tensor:
    """Shrink and enlarge images (N, 3, H, W), blur them, and add noise, in a random order, without clamping the result.

    Each of the three is left out with probability `SKIPPED`, since many reconstructions are neither blurred nor noisy. Which are
    left out, the order, the factor and the method of shrinking, and the width of the blur are drawn once for all images, and
    noise levels for each image.
    """
    steps = [_shrink_and_enlarge, _blur, _add_noise]
    for i in torch.randperm(len(steps), generator=rng).tolist():
        if float(torch.rand((), generator=rng)) >= SKIPPED:
            x = steps[i](x, rng)
    return x


def add_noise(x: Tensor, rng: Generator) -> Tensor:
    """Return images (N, 3, H, W) with Gaussian noise, whose standard deviation is drawn from [0, MAX_DENOISED) for each image."""
    return x + _draw_noise(x, MAX_DENOISED, rng)


def _shrink_and_enlarge(x: Tensor, rng: Generator) -> Tensor:
    """Shrink the sides of images, add noise to the small images, and enlarge them to their old size (bicubic).

    The factor, one of `FACTORS`, and the method of shrinking are drawn at random.
    """
    factor = FACTORS[_draw_index(len(FACTORS), rng)]
    mode = cast(Shrinker, SHRINKERS[_draw_index(len(SHRINKERS), rng)])
    size = [side // factor for side in x.shape[-2:]]
    filtered = mode in ("bilinear", "bicubic")
    small = interpolate(x, size=size, mode=mode, antialias=filtered) if filtered else interpolate(x, size=size, mode=mode)
    return interpolate(small + _draw_noise(small, MAX_LATENT_NOISE, rng), size=x.shape[-2:], mode="bicubic", align_corners=False)


def _blur(x: Tensor, rng: Generator) -> Tensor:
    deviation = MAX_BLUR * float(torch.rand((), generator=rng))
    blurred: Tensor = gaussian_blur(x, [5, 5], [max(deviation, 0.05)])
    return blurred


def _add_noise(x: Tensor, rng: Generator) -> Tensor:
    return x + _draw_noise(x, MAX_PIXEL_NOISE, rng)


def _draw_noise(x: Tensor, largest: float, rng: Generator) -> Tensor:
    """Return Gaussian noise for images x, with a standard deviation for each image that is drawn uniformly from [0, largest)."""
    deviation = largest * torch.rand(len(x), 1, 1, 1, generator=rng)
    return (deviation * torch.randn(x.shape, generator=rng)).to(x)


def _draw_index(count: int, rng: Generator) -> int:
    return int(torch.randint(count, (), generator=rng))
