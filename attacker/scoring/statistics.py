"""Means and rates with the uncertainty that a few dozen examples leave."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy.stats import bootstrap, norm

MANY = 1000
"""Beyond so many values the bootstrap costs much and adds nothing."""


@dataclass(frozen=True)
class Estimate:
    """value with its two-sided 95 % confidence interval, over `count` examples."""

    value: float
    low: float
    high: float
    count: int


def rate(successes: float, count: int, *, level: float = 0.95) -> Estimate:
    """A share, with Wilson's interval, which is honest at 0 and 1 (Wilson 1927). An example attacked often may count in part."""
    if not count:
        raise ValueError("a rate over no examples")
    z = norm.ppf(0.5 + level / 2)
    share = successes / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    low = float(centre - half) if successes else 0.0
    high = float(centre + half) if successes < count else 1.0
    return Estimate(share, low, high, count)


def mean(values: Sequence[float], *, level: float = 0.95, seed: int = 0) -> Estimate:
    """A mean, with the bootstrap's bias-corrected interval; of more than a thousand values, the normal one.

    The interval spans the values themselves where there are one or two of them, or all are equal.
    """
    if not values:
        raise ValueError("a mean over no examples")
    array = np.asarray(values, dtype=float)
    value = float(array.mean())
    if len(array) < 3 or np.ptp(array) < 1e-12 * max(1.0, abs(value)):
        return Estimate(value, float(array.min()), float(array.max()), len(array))
    if len(array) > MANY:
        half = float(norm.ppf(0.5 + level / 2) * array.std(ddof=1) / sqrt(len(array)))
        return Estimate(value, value - half, value + half, len(array))
    interval = bootstrap(
        (array,), np.mean, confidence_level=level, n_resamples=2000, method="BCa", rng=np.random.default_rng(seed)
    ).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high), len(array))
