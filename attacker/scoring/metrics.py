"""How close a reconstruction is to the truth. Examples are (N, *shape) with values in [0, 1]; every answer is (N,)."""

import torch
from torch import Tensor
from torch.nn.functional import conv2d

PSNR_CAP = 120.0
"""In dB; what an exact reconstruction scores."""
MAX_MSE = 0.009
"""Largest mean squared error of a success on images: it agrees with every success rate in CPL's tables 7 and 8."""
TABLE_TOLERANCE = 0.05
"""Largest error of a success on table rows, as a share of a column's range."""


def mse(x: Tensor, truth: Tensor) -> Tensor:
    """Mean of squared differences of each example."""
    return (x - truth).square().flatten(1).mean(dim=1)


def psnr(x: Tensor, truth: Tensor) -> Tensor:
    """-10 log10 of each example's own mean squared error, in dB, capped at 120."""
    return (-10 * mse(x, truth).clamp(min=10 ** (-PSNR_CAP / 10)).log10()).clamp(max=PSNR_CAP)


def ssim(x: Tensor, truth: Tensor) -> Tensor:
    """Structural similarity of images (N, C, H, W) over Gaussian windows of 11x11, sigma 1.5 (Wang et al. 2004).

    Mean over channels and over windows that lie inside the image. Raises ValueError for images smaller than a window.
    """
    if min(x.shape[-2:]) < 11:
        raise ValueError(f"SSIM needs images of 11x11 pixels at least, got {tuple(x.shape[-2:])}")
    x, truth = x.double(), truth.double()
    offsets = torch.arange(11, dtype=x.dtype) - 5
    line = torch.exp(-offsets.square() / (2 * 1.5**2))
    window = torch.outer(line, line)
    channels = x.shape[1]
    kernel = (window / window.sum()).expand(channels, 1, 11, 11)

    def local_mean(t: Tensor) -> Tensor:
        return conv2d(t, kernel, groups=channels)

    mean_x, mean_t = local_mean(x), local_mean(truth)
    var_x = local_mean(x * x) - mean_x * mean_x
    var_t = local_mean(truth * truth) - mean_t * mean_t
    covariance = local_mean(x * truth) - mean_x * mean_t
    c1, c2 = 0.01**2, 0.03**2
    similarity = (2 * mean_x * mean_t + c1) * (2 * covariance + c2)
    similarity = similarity / ((mean_x.square() + mean_t.square() + c1) * (var_x + var_t + c2))
    return similarity.flatten(1).mean(dim=1).float()


def succeeded(x: Tensor, truth: Tensor) -> Tensor:
    """Whether each example is recovered: images by `MAX_MSE`, table rows by `TABLE_TOLERANCE` in every column."""
    if x.ndim == 4:
        return mse(x, truth) <= MAX_MSE
    return ((x - truth).abs() <= TABLE_TOLERANCE).all(dim=1)
