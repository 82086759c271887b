"""Similarity of reconstructions and originals. Examples are (N, *shape), originals in [0, 1].

The measures return one value per example, (N,).
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from attacker.reconstruction import MAX_RECOVERED_MSE
from fedsim.recording import Column, DataSpec

PSNR_CAP = 120.0
"""PSNR of an exact reconstruction, in dB."""
TABLE_TOLERANCE = 0.05
"""Largest error of any continuous column in a recovered table row, as a fraction of the column's range."""
C1, C2 = 0.01**2, 0.03**2
"""Constants that keep SSIM finite on flat images (Wang et al. 2004), for values in [0, 1]."""


def mse(x: Tensor, truth: Tensor) -> Tensor:
    """Return the mean squared error of each of N examples, (N,). x, truth: (N, ...)."""
    return (x - truth).square().flatten(1).mean(dim=1)


def psnr(x: Tensor, truth: Tensor) -> Tensor:
    """Return -10 log10(MSE) of each of N examples in dB, (N,), capped at 120. x, truth: (N, ...), for values in [0, 1]."""
    return (-10 * mse(x, truth).clamp(min=10 ** (-PSNR_CAP / 10)).log10()).clamp(max=PSNR_CAP)


def ssim(x: Tensor, truth: Tensor) -> Tensor:
    """Return the structural similarity of images (N, C, H, W) over Gaussian windows of 11x11, sigma 1.5 (Wang et al. 2004).

    The result is the mean over channels and over windows inside the image. Raises ValueError for images smaller than a window.
    """
    if min(x.shape[-2:]) < 11:
        raise ValueError(f"SSIM needs images of at least 11x11 pixels, got {tuple(x.shape[-2:])}")
    x, truth = x.double(), truth.double()
    offsets = torch.arange(11, dtype=x.dtype) - 5
    line = torch.exp(-offsets.square() / (2 * 1.5**2))
    window = torch.outer(line, line)
    channels = x.shape[1]
    kernel = (window / window.sum()).expand(channels, 1, 11, 11)

    def compute_local_mean(t: Tensor) -> Tensor:
        return conv2d(t, kernel, groups=channels)

    mean_x, mean_t = compute_local_mean(x), compute_local_mean(truth)
    var_x = compute_local_mean(x * x) - mean_x * mean_x
    var_t = compute_local_mean(truth * truth) - mean_t * mean_t
    covariance = compute_local_mean(x * truth) - mean_x * mean_t
    return _compute_ssim(mean_x, mean_t, var_x, var_t, covariance).flatten(1).mean(dim=1).float()


def ssim_global(x: Tensor, truth: Tensor) -> Tensor:
    """Return the structural similarity with the whole image as a single window, as for the attack ROG (Yue et al. 2022).

    x, truth: (N, C, H, W) with 1 or 3 channels. Colour images are converted to YCrCb (ITU-R BT.601, full range), whose
    similarities are weighted 0.8, 0.1 and 0.1. Values are not comparable with values of `ssim`, since the places of pixels do not
    matter if they are equal in both images. Raises ValueError for another number of channels.
    """
    if x.shape[1] not in (1, 3):
        raise ValueError(f"the global SSIM needs images of 1 or 3 channels, got {x.shape[1]}")
    x, truth = (_convert_to_ycrcb(t.double()).flatten(2) for t in (x, truth))
    mean_x, mean_t = x.mean(dim=2), truth.mean(dim=2)
    off_x, off_t = x - mean_x[..., None], truth - mean_t[..., None]
    variances = off_x.square().mean(dim=2), off_t.square().mean(dim=2)
    similarity = _compute_ssim(mean_x, mean_t, *variances, (off_x * off_t).mean(dim=2))
    share = torch.tensor([0.8, 0.1, 0.1] if x.shape[1] == 3 else [1.0], dtype=x.dtype)
    return (similarity @ share).float()


def _compute_ssim(mean_x: Tensor, mean_t: Tensor, var_x: Tensor, var_t: Tensor, covariance: Tensor) -> Tensor:
    """Return SSIM from the moments of a window (Wang et al. 2004, equation 13)."""
    above = (2 * mean_x * mean_t + C1) * (2 * covariance + C2)
    return above / ((mean_x.square() + mean_t.square() + C1) * (var_x + var_t + C2))


def _convert_to_ycrcb(x: Tensor) -> Tensor:
    """Convert RGB images (N, 3, H, W) to Y, Cr and Cb; return grey images unchanged. Neutral chroma is 128 / 255."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(dim=1)
    y = 0.299 * red + 0.587 * green + 0.114 * blue
    return torch.stack([y, (red - y) / 1.402 + 128 / 255, (blue - y) / 1.772 + 128 / 255], dim=1)


def is_flat(truth: Tensor) -> Tensor:
    """Return whether each image's mean colour counts as recovered (`MAX_RECOVERED_MSE`). truth: (N, C, H, W)."""
    return mse(truth.mean(dim=(2, 3), keepdim=True).expand_as(truth), truth) <= MAX_RECOVERED_MSE


def is_recovered(x: Tensor, truth: Tensor, spec: DataSpec | None = None) -> Tensor:
    """Return whether each example is recovered.

    An image is recovered if its MSE is at most `MAX_RECOVERED_MSE`. A table row is recovered if every categorical variable is
    right and every continuous column is within `TABLE_TOLERANCE`. A categorical variable whose true category was not seen in
    training (all zeros in truth) is ignored. x: without NaN. spec: kinds of the columns; without it all are continuous.
    """
    if x.ndim == 4:
        return mse(x, truth) <= MAX_RECOVERED_MSE
    columns = spec.columns if spec else ()
    return ~(measure_continuous_error(x, truth, columns) > TABLE_TOLERANCE) & ~(measure_categorical_share(x, truth, columns) < 1)


# --- rows of tables: error of continuous columns, and correctness of categorical variables ---


def group_columns(columns: Sequence[Column]) -> list[tuple[int, ...]]:
    """Return the indices of the one-hot columns of each categorical variable: adjacent columns with the same name."""
    numbered = groupby(enumerate(columns), key=lambda pair: (pair[1].kind, pair[1].name))
    return [tuple(i for i, _ in group) for (kind, _), group in numbered if kind == "categorical"]


def measure_continuous_error(x: Tensor, truth: Tensor, columns: Sequence[Column]) -> Tensor:
    """Return the largest absolute error over the continuous columns of each row, (N,); NaN if there are none.

    x, truth: (N, F), columns scaled to [0, 1], so that errors are fractions of a column's range. Without `columns` all F columns
    are continuous.
    """
    chosen = [i for i in range(truth.shape[1]) if not columns or columns[i].kind == "continuous"]
    if not chosen:
        return torch.full((len(truth),), torch.nan)
    return (x - truth).abs()[:, chosen].amax(dim=1)


def measure_categorical_share(x: Tensor, truth: Tensor, columns: Sequence[Column]) -> Tensor:
    """Return the share of categorical variables whose true category has the largest value in x, (N,).

    x, truth: (N, F), with one-hot variables as described by `columns`. A tie counts as wrong. A variable that is all zeros in
    truth, a category not seen in training, is ignored. The share is NaN if no variable is left.
    """
    right, known = torch.zeros(len(truth)), torch.zeros(len(truth))
    for variable in group_columns(columns):
        scores, true = x[:, list(variable)], truth[:, list(variable)]
        seen = true.amax(dim=1) > 0
        true_scores = scores.gather(1, true.argmax(dim=1, keepdim=True))
        reached = (scores >= true_scores).sum(dim=1)
        right += (seen & (reached == 1)).float()
        known += seen.float()
    return right / known
