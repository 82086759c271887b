"""Shares and means of examples that come in clusters, with intervals that hold the true value as often as they say.

The examples of one case succeed or fail together: one batch, one search. A cluster is what is tied by a case or by an example
that several cases share, see `clusters_of`. benchmarks/calibration.py simulates their coverage.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, t

Floats = NDArray[np.float64]
RESAMPLES = 2000
PSEUDO = 0.3
"""Chosen by simulation, see `_effective`: 8 to 40 clusters of 1 to 16, with correlations of 0 to 1 and shares of 0.1 to 0.9."""
MANY = 200
"""Clusters from which on the t interval is as good as the bootstrap."""


@dataclass(frozen=True)
class Estimate:
    """value with its two-sided 95 % confidence interval, over `count` examples in `clusters` independent groups."""

    value: float
    low: float
    high: float
    count: int
    clusters: int = 0


@dataclass(frozen=True)
class Distribution(Estimate):
    """A mean, beside the median, the first decile and the ninth one of the same values."""

    median: float = 0.0
    p10: float = 0.0
    p90: float = 0.0


def clusters_of(pairs: Iterable[tuple[Hashable, Hashable]]) -> dict[Hashable, int]:
    """Number the groups of examples that are tied to each other, by the example.

    pairs: (example, case) of every row. Two examples are tied where a case holds both, and two cases where they share an example.
    """
    parent: dict[Hashable, Hashable] = {}

    def root(one: Hashable) -> Hashable:
        parent.setdefault(one, one)
        while parent[one] != one:
            parent[one] = parent[parent[one]]
            one = parent[one]
        return one

    examples: dict[Hashable, None] = {}
    for example, case in pairs:
        examples[example] = None
        parent[root(("example", example))] = root(("case", case))
    numbers: dict[Hashable, int] = {}
    return {example: numbers.setdefault(root(("example", example)), len(numbers)) for example in examples}


def rate(successes: float, count: int, *, level: float = 0.95) -> Estimate:
    """Estimate a share of `count` independent examples, with Wilson's interval (Wilson 1927), which holds at 0 and 1, too."""
    if not count:
        raise ValueError("a rate over no examples")
    return Estimate(successes / count, *wilson(successes / count, count, level=level), count, count)


def share(values: Sequence[float], clusters: Sequence[Hashable] | None = None, *, level: float = 0.95) -> Estimate:
    """Estimate a share of examples in clusters: Wilson's interval with the effective number of examples.

    values:   in [0, 1]; an example attacked often may count in part. clusters: of each; None where each is one of its own.
    The number of examples is divided by the design effect 1 + (m - 1) r, where r is the correlation within clusters of m by the
    analysis of variance (Kish 1965; Donner and Klar 1993), see `_effective`. It is never less than the number of clusters, which
    it is where clusters succeed or fail as a whole, and where all values are equal: then nothing shows that they vary within one.
    """
    if not len(values):
        raise ValueError("a share of no examples")
    array, sizes, own = _grouped(values, clusters)
    value, count = float(array.mean()), len(array)
    return Estimate(value, *wilson(value, _effective(array, sizes, own), level=level), count, len(sizes))


def wilson(value: float, count: float, *, level: float = 0.95) -> tuple[float, float]:
    """Compute Wilson's interval of a share of so many independent examples, which need be no whole number."""
    z = float(norm.ppf(0.5 + level / 2))
    centre = (value + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(max(value * (1 - value), 0.0) / count + z * z / (4 * count * count))
    return (centre - half if value > 0 else 0.0), (centre + half if value < 1 else 1.0)


def mean(values: Sequence[float], clusters: Sequence[Hashable] | None = None, *, level: float = 0.95) -> Distribution:
    """Estimate a mean of examples in clusters, with the bootstrap-t interval over clusters; of more than `MANY`, the t interval.

    clusters: of each value; None where each is one of its own. The interval spans the values themselves where there are one or
    two clusters, or all clusters are equal.
    """
    if not len(values):
        raise ValueError("a mean over no examples")
    array, sizes, own = _grouped(values, clusters)
    value, count = float(array.mean()), len(sizes)
    totals: Floats = np.bincount(own, array, minlength=count).astype(np.float64)
    spread = np.ptp(totals / sizes)
    if count < 3 or spread < 1e-12 * max(1.0, abs(value)):
        low, high = float(array.min()), float(array.max())
    else:
        error = float(_error(totals[None], sizes[None], np.ones((1, count)))[1][0])
        below, above = _quantiles(totals, sizes, value, error, level) if count <= MANY else _of_t(count, level)
        low, high = value - above * error, value - below * error
    p10, middle, p90 = (float(one) for one in np.quantile(array, [0.1, 0.5, 0.9]))
    return Distribution(value, low, high, len(array), count, median=middle, p10=p10, p90=p90)


def _grouped(values: Sequence[float], clusters: Sequence[Hashable] | None) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """The values, the sizes of the clusters, and the number of each value's cluster."""
    array = np.asarray(values, dtype=np.float64)
    numbers: dict[Hashable, int] = {}
    own = [numbers.setdefault(name, len(numbers)) for name in (range(len(array)) if clusters is None else clusters)]
    if len(own) != len(array):
        raise ValueError(f"{len(array)} values and {len(own)} clusters: each value needs the cluster that it belongs to")
    index = np.array(own, dtype=np.int64)
    return array, np.bincount(index).astype(np.float64), index


def _effective(array: Floats, sizes: Floats, own: NDArray[np.int64]) -> float:
    """How many independent examples say as much.

    Of a share near 0 or 1, few clusters tell how they vary, and the analysis of variance finds too little correlation. `PSEUDO`
    clusters that succeed and as many that fail as a whole are added to the variance between clusters, by (2 share - 1)^2 of them.
    """
    total, count = float(sizes.sum()), len(sizes)
    least = total**2 / float((sizes**2).sum())
    if count == total or count < 2 or np.ptp(array) == 0:
        return least
    value, means = float(array.mean()), np.bincount(own, array) / sizes
    added = PSEUDO * (2 * value - 1) ** 2 * total / least * (value**2 + (1 - value) ** 2)
    between = (float((sizes * (means - value) ** 2).sum()) + added) / (count - 1)
    within = float(((array - means[own]) ** 2).sum()) / (total - count)
    typical = (total - total / least) / (count - 1)
    whole = between + (typical - 1) * within
    correlation = min(max((between - within) / whole, 0.0), 1.0) if whole > 0 else 1.0
    return min(max(total / (1 + (total / least - 1) * correlation), least), total)


def _error(totals: Floats, sizes: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Means and their standard errors by clusters, of samples (B, K) in which clusters stand so many times."""
    count = times.shape[1]
    size = (times * sizes).sum(axis=1)
    means = (times * totals).sum(axis=1) / size
    residual = (times * (totals - means[:, None] * sizes) ** 2).sum(axis=1)
    return means, np.sqrt(count / (count - 1) * residual) / size


def _of_t(count: int, level: float) -> tuple[float, float]:
    half = float(t.ppf(0.5 + level / 2, count - 1))
    return -half, half


def _quantiles(totals: Floats, sizes: Floats, value: float, error: float, level: float) -> tuple[float, float]:
    """Lower and upper quantile of (mean* - mean) / error* over resampled clusters (Efron 1981; Hall 1988).

    No resample's error counts for less than 0.3 of the sample's own: of few clusters, some resamples hold next to one alone.
    """
    means, errors = _error(totals[None], sizes[None], _resamples(len(sizes)))
    ratio = (means - value) / np.maximum(errors, 0.3 * error)
    below, above = np.quantile(ratio, [0.5 - level / 2, 0.5 + level / 2])
    return float(below), float(above)


@lru_cache(maxsize=32)
def _resamples(count: int) -> Floats:
    """How often each cluster stands in each resample, (RESAMPLES, count)."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES).astype(np.float64)
