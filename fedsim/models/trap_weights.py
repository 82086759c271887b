"""Trap weights: rows that hold the same values twice, so that few inputs activate their neurons (Boenisch et al. 2023)."""

import torch
from torch import Tensor

from fedsim.models.inspected_layers import spread_rows

MIRROR_ERROR = 0.02
"""Largest relative deviation of the ratios between the sorted positive and negative values of a row that was mirrored."""
MIN_MIRROR_FACTOR = 1e-3
"""Smallest difference of the mean of these ratios from 1. Rows of antisymmetric filters, such as cosines and wavelets, have
ratios of 1; trap weights are scaled, since otherwise they would react to half of all inputs."""
MAX_PAIRED_ROWS, MAX_PAIRED_VALUES, MAX_FACTORS = 64, 512, 32
"""Largest number of rows that are examined for trap weights, and of their values and factors for values that are multiples."""
PAIR_ERROR, MIN_FACTOR, MAX_PAIRED_DEVIATION = 5e-7, 0.55, 0.1
"""Largest relative rounding error of such a multiple, smallest factor, and largest deviation of the share of values with a
multiple from one half. In a geometric sequence nearly all values have one."""


def compute_mirrored_share(weight: Tensor) -> float:
    """Return the share of rows that hold about the same values twice, once positive and once negative, up to a factor.

    Half of the values of such a row are positive, and half negative. The ratio of the k-th largest magnitude among the negative
    values to the k-th largest positive value is nearly the same for all k, and differs from 1 by `MIN_MIRROR_FACTOR` on average.
    With an odd number of values, the middle one is ignored. At most `MAX_PAIRED_ROWS` rows, evenly spread, are examined.
    """
    rows = spread_rows(weight, MAX_PAIRED_ROWS)
    half = rows.shape[1] // 2
    ordered = rows.sort(dim=1).values
    negative, positive = -ordered[:, :half], ordered.flip(1)[:, :half]
    ratio = negative / positive.clamp(min=torch.finfo(torch.float64).tiny)
    even = (negative > 0).all(dim=1) & (positive > 0).all(dim=1)
    mean = ratio.mean(dim=1)
    same = (ratio.std(dim=1) < MIRROR_ERROR * mean) & ((mean - 1).abs() > MIN_MIRROR_FACTOR)
    return float((even & same).double().mean())


def compute_paired_share(weight: Tensor) -> float:
    """Return the share of rows in which every second value is another value of the row, times a factor that is the same for all.

    These are trap weights whose values have any sign before they are copied. The factors that are tried are the ratios of the
    largest magnitudes of the row to the largest one. At most `MAX_PAIRED_ROWS` rows and `MAX_PAIRED_VALUES` values of each are
    examined. Float32 weights only: in lower precision, many values are multiples of others by chance.
    """
    ordered = spread_rows(weight, MAX_PAIRED_ROWS).abs().sort(dim=1).values
    largest, values = ordered[:, -1:], spread_rows(ordered.T, MAX_PAIRED_VALUES).T
    found = torch.zeros(len(ordered), dtype=torch.bool, device=weight.device)
    for place in range(2, min(MAX_FACTORS, ordered.shape[1] - 1) + 2):
        factor = ordered[:, -place, None] / largest.clamp(min=torch.finfo(torch.float64).tiny)
        wanted = values * factor
        after = torch.searchsorted(ordered, wanted.contiguous()).clamp(1, ordered.shape[1] - 1)
        gap = torch.minimum((ordered.gather(1, after) - wanted).abs(), (ordered.gather(1, after - 1) - wanted).abs())
        share = ((gap <= PAIR_ERROR * wanted) & (wanted > 0)).double().mean(dim=1)
        suitable = ((factor > MIN_FACTOR) & (factor < 1 - MIN_MIRROR_FACTOR))[:, 0]
        found |= suitable & ((share - 0.5).abs() <= MAX_PAIRED_DEVIATION)
    return float(found.double().mean())
