"""Shares and means of examples that come in clusters, with intervals that hold the true value as often as they say.

The examples of one case succeed or fail together: one batch, one search. A cluster is what is tied by a case or by an example
that several cases share, see `clusters_of`. benchmarks/calibration.py simulates their coverage.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betainc
from scipy.stats import norm, t

Floats = NDArray[np.float64]
RESAMPLES = 2000
PSEUDO = 0.1
"""Chosen by simulation, see `_effective`: 4 to 40 clusters of 1 to 16, with correlations of 0 to 1 and shares of 0.02 to 0.98."""
FEWEST_CLUSTERS = 5
"""Fewest clusters over which a mean has an interval: of four, skewed values are held in 90 % of samples."""
FEWEST_CORRELATED = 4
"""Fewest clusters from which the correlation within them is estimated; it is taken to be 1 in fewer."""
MANY = 200
"""Clusters from which on the t interval is as good as the bootstrap."""


@dataclass(frozen=True)
class Estimate:
    """value with its two-sided 95 % confidence interval, over `count` examples in `clusters` independent groups.

    is_interval: False where so few groups tell nothing of the uncertainty; low and high are then the range of the values.
    """

    value: float
    low: float
    high: float
    count: int
    clusters: int = 0
    is_interval: bool = True


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


def share(values: Sequence[float], clusters: Sequence[Hashable] | None = None, *, level: float = 0.95) -> Estimate:
    """Estimate a share of examples in clusters: the mid-p interval of the effective number of examples.

    values:   in [0, 1]; an example attacked often may count in part. clusters: of each; None where each is one of its own.
    The number of examples is divided by the design effect 1 + (m - 1) r, where r is the correlation within clusters of m by the
    analysis of variance (Kish 1965; Donner and Klar 1993), see `_effective`, and by the squared ratio of the quantiles of t and
    the normal distribution, for r is estimated (Korn and Graubard 1998). It is never less than the number of clusters, which it
    is where clusters succeed or fail as a whole, and where all values are equal: then nothing shows that they vary within one.
    """
    if not len(values):
        raise ValueError("a share of no examples")
    array, sizes, own = _grouped(values, clusters)
    value, count = float(array.mean()), len(array)
    return Estimate(value, *mid_p(value, _effective(array, sizes, own, level), level=level), count, len(sizes))


@lru_cache(maxsize=4096)
def mid_p(value: float, count: float, *, level: float = 0.95) -> tuple[float, float]:
    """Compute the mid-p interval of a share of so many independent examples, which need be no whole number (Lancaster 1961).

    It holds every share for which so many successes, counted half, or more, and so many or fewer, have a chance of at least
    (1 - level) / 2. Unlike Wilson's it holds shares near 0 and 1 as often as it says; unlike Clopper and Pearson's it does not
    hold those in between too often.
    """
    successes, tail = value * count, (1 - level) / 2

    def least(successes: float) -> float:
        """Solve for the share at which so many successes or more have the chance `tail`; the last of them counts half."""

        def excess(p: float) -> float:
            more = betainc(successes + 1, count - successes, p) if count - successes > 1e-9 else 0.0
            return float(betainc(successes, count - successes + 1, p) + more) / 2 - tail

        return float(brentq(excess, 0.0, 1.0)) if successes > 1e-9 else 0.0

    return least(successes), 1 - least(count - successes)


def mean(values: Sequence[float], clusters: Sequence[Hashable] | None = None, *, level: float = 0.95) -> Distribution:
    """Estimate a mean of examples in clusters, with the wider of the t and the bootstrap-t interval over clusters on either side.

    clusters: of each value; None where each is one of its own. Of more than `MANY`, the t interval. Where all clusters are equal,
    it spans the values. Of fewer than `FEWEST_CLUSTERS` there is no interval.
    """
    if not len(values):
        raise ValueError("a mean over no examples")
    array, sizes, own = _grouped(values, clusters)
    value, count = float(array.mean()), len(sizes)
    totals: Floats = np.bincount(own, array, minlength=count).astype(np.float64)
    spread = np.ptp(totals / sizes)
    is_interval = count >= FEWEST_CLUSTERS
    if not is_interval or spread < 1e-12 * max(1.0, abs(value)):
        low, high = float(array.min()), float(array.max())
    else:
        error = float(_error(totals[None], sizes[None], np.ones((1, count)))[1][0])
        half = float(t.ppf(0.5 + level / 2, count - 1))
        below, above = _quantiles(totals, sizes, value, error, level) if count <= MANY else (-half, half)
        low, high = value - max(above, half) * error, value - min(below, -half) * error
    p10, middle, p90 = (float(one) for one in np.quantile(array, [0.1, 0.5, 0.9]))
    return Distribution(value, low, high, len(array), count, is_interval, median=middle, p10=p10, p90=p90)


def _grouped(values: Sequence[float], clusters: Sequence[Hashable] | None) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """The values, the sizes of the clusters, and the number of each value's cluster."""
    array = np.asarray(values, dtype=np.float64)
    numbers: dict[Hashable, int] = {}
    own = [numbers.setdefault(name, len(numbers)) for name in (range(len(array)) if clusters is None else clusters)]
    if len(own) != len(array):
        raise ValueError(f"{len(array)} values and {len(own)} clusters: each value needs the cluster that it belongs to")
    index = np.array(own, dtype=np.int64)
    return array, np.bincount(index).astype(np.float64), index


def _effective(array: Floats, sizes: Floats, own: NDArray[np.int64], level: float) -> float:
    """How many independent examples say as much.

    Of a share near 0 or 1, few clusters tell how they vary, and the analysis of variance finds too little correlation. `PSEUDO`
    clusters that succeed and as many that fail as a whole are added to the variance between clusters, by (2 share - 1)^2 of them.
    The quantile of t is that of twice as many degrees of freedom as clusters have: the binomial variance itself is known.
    """
    total, count = float(sizes.sum()), len(sizes)
    least = total**2 / float((sizes**2).sum())
    if count == total or count < FEWEST_CORRELATED or np.ptp(array) == 0:
        return least
    value, means = float(array.mean()), np.bincount(own, array) / sizes
    added = PSEUDO * (2 * value - 1) ** 2 * total / least * (value**2 + (1 - value) ** 2)
    between = (float((sizes * (means - value) ** 2).sum()) + added) / (count - 1)
    within = float(((array - means[own]) ** 2).sum()) / (total - count)
    typical = (total - total / least) / (count - 1)
    whole = between + (typical - 1) * within
    correlation = min(max((between - within) / whole, 0.0), 1.0) if whole > 0 else 1.0
    known = (norm.ppf(0.5 + level / 2) / t.ppf(0.5 + level / 2, 2 * (count - 1))) ** 2
    return max(float(known) * min(total / (1 + (total / least - 1) * correlation), total), least)


def _error(totals: Floats, sizes: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Means and their standard errors by clusters, of samples (B, K) in which clusters stand so many times."""
    count = times.shape[1]
    size = (times * sizes).sum(axis=1)
    means = (times * totals).sum(axis=1) / size
    residual = (times * (totals - means[:, None] * sizes) ** 2).sum(axis=1)
    return means, np.sqrt(count / (count - 1) * residual) / size


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
