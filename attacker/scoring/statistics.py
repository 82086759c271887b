"""Estimates of shares and means, with confidence intervals for examples that come in clusters.

The examples of one case tend to succeed or fail together, since they are one batch and one search. A cluster is a set of examples
that are connected by common cases, see `find_clusters`. benchmarks/calibration.py measures the coverage of the intervals by
simulation.

A case is the observations that are attacked together: one round of a client, or several.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from scipy.special import betainc
from scipy.stats import norm, rankdata, t

Floats = NDArray[np.float64]
CONFIDENCE_LEVEL = 0.95
NUM_RESAMPLES = 2000
CONFIDENCE_BINS = 10
PSEUDO_CLUSTERS = 0.1
"""Number of clusters of only successes, and of clusters of only failures, that `_estimate_effective_number` adds. It was chosen
by simulations of 4 to 40 clusters of 1 to 16 examples, with correlations of 0 to 1 and shares of 0.02 to 0.98."""
MIN_INTERVAL_CLUSTERS = 5
"""Smallest number of clusters for which a mean has an interval: with four, the interval of a skewed distribution contains its
mean in 90 % of samples only."""
MIN_CORRELATION_CLUSTERS = 4
"""Smallest number of clusters from which the correlation within them is estimated; with fewer, it is assumed to be 1."""
MAX_BOOTSTRAP_CLUSTERS = 200
"""Largest number of clusters for which the bootstrap is computed; with more, the t interval is as good."""


@dataclass(frozen=True)
class Estimate:
    """A value with its two-sided confidence interval, 95 % by default, over `count` examples in `clusters` independent groups.

    is_interval: False if there are too few groups for an interval; low and high are then the range of the values.
    """

    value: float
    low: float
    high: float
    count: int
    clusters: int = 0
    is_interval: bool = True


@dataclass(frozen=True)
class Distribution(Estimate):
    """A mean with its interval, and the median, first decile (p10) and ninth decile (p90) of the same values."""

    median: float = 0.0
    p10: float = 0.0
    p90: float = 0.0


def find_clusters(pairs: Iterable[tuple[Hashable, Hashable]]) -> dict[Hashable, int]:
    """Return a dict from each example to the number of its cluster, counted from 0.

    pairs: (example, case) of every row. Clusters are the connected components of the graph that links the examples of each case.
    """
    nodes: dict[tuple[int, Hashable], int] = {}
    ends = [[nodes.setdefault((side, value), len(nodes)) for side, value in enumerate(pair)] for pair in pairs]
    if not nodes:
        return {}
    graph = coo_matrix((np.ones(len(ends)), np.transpose(ends)), shape=(len(nodes), len(nodes)))
    components = connected_components(graph, directed=False)[1]
    numbers: dict[int, int] = {}
    return {value: numbers.setdefault(components[node], len(numbers)) for (side, value), node in nodes.items() if side == 0}


def estimate_share(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Estimate:
    """Estimate a share of examples in clusters, with the mid-p interval for the effective number of examples.

    values:   in [0, 1], one per example; between 0 and 1 for an example that was attacked several times with different success.
    clusters: cluster of each example; None if every example is its own cluster. The effective number is then the number of
              examples.

    With clusters of several examples, the effective number is the number of examples divided by the design effect 1 + (m - 1) r.
    Here m is the mean over examples of the size of an example's cluster, and r the correlation within clusters by the analysis of
    variance (Kish 1965; Donner and Klar 1993). The effective number is also divided by the squared ratio of the quantiles of the
    t and the normal distribution, because r is estimated (Korn and Graubard 1998). It is at least the number of examples divided
    by m, which for clusters of equal size is the number of clusters. This lower limit is taken if all values are equal or there
    are fewer than `MIN_CORRELATION_CLUSTERS` clusters, since the data then do not show r.

    Raises ValueError without values, and if `values` and `clusters` differ in length.
    """
    if not len(values):
        raise ValueError("values is empty: a proportion cannot be estimated from no examples; give at least one value")
    array, sizes, cluster_indices = _group_values(values, clusters)
    value, count = float(array.mean()), len(array)
    low, high = compute_mid_p_interval(value, _estimate_effective_number(array, sizes, cluster_indices))
    return Estimate(value, low, high, count, len(sizes))


@lru_cache(maxsize=4096)
def compute_mid_p_interval(value: float, count: float) -> tuple[float, float]:
    """Return the ends of the mid-p confidence interval of a share of `count` independent examples (Lancaster 1961).

    value: the observed share. `count` may be fractional. The interval contains every share p for which two probabilities are at
    least (1 - CONFIDENCE_LEVEL) / 2: that there are at least as many successes as observed, and that there are at most as many.
    In both, the probability of exactly the observed number counts half.
    """
    successes, tail = value * count, (1 - CONFIDENCE_LEVEL) / 2

    def find_limit(successes: float) -> float:
        """Return the share for which `successes` or more (`successes` counting half) have the probability `tail`."""

        def compute_excess(p: float) -> float:
            more = betainc(successes + 1, count - successes, p) if count - successes > 1e-9 else 0.0
            return float(betainc(successes, count - successes + 1, p) + more) / 2 - tail

        return float(brentq(compute_excess, 0.0, 1.0)) if successes > 1e-9 else 0.0

    return find_limit(successes), 1 - find_limit(count - successes)


def mean(values: Sequence[float], clusters: Sequence[Hashable] | None = None, *, level: float = CONFIDENCE_LEVEL) -> Distribution:
    """Estimate a mean of examples in clusters, with its interval, median and deciles.

    On each side, the interval is the wider of the t and the bootstrap-t interval over clusters; for more than
    `MAX_BOOTSTRAP_CLUSTERS` clusters it is the t interval. If all cluster means are equal, or if there are fewer than
    `MIN_INTERVAL_CLUSTERS` clusters, low and high are the range of the values; in the second case `is_interval` is False.

    clusters: cluster of each value; None if every value is its own cluster. Raises ValueError without values, and if `values` and
    `clusters` differ in length.
    """
    if not len(values):
        raise ValueError("a mean needs at least one example, got none")
    array, sizes, cluster_indices = _group_values(values, clusters)
    value, count = float(array.mean()), len(sizes)
    totals: Floats = np.bincount(cluster_indices, array, minlength=count).astype(np.float64)
    spread = np.ptp(totals / sizes)
    is_interval = count >= MIN_INTERVAL_CLUSTERS
    if not is_interval or spread < 1e-12 * max(1.0, abs(value)):
        low, high = float(array.min()), float(array.max())
    else:
        error = float(compute_errors(totals, sizes, np.ones((1, count)))[1][0])
        half = float(t.ppf(0.5 + level / 2, count - 1))
        below, above = (
            _compute_quantiles(totals, sizes, value, error, level) if count <= MAX_BOOTSTRAP_CLUSTERS else (-half, half)
        )
        low, high = value - max(above, half) * error, value - min(below, -half) * error
    p10, middle, p90 = (float(quantile) for quantile in np.quantile(array, [0.1, 0.5, 0.9]))
    return Distribution(value, low, high, len(array), count, is_interval, median=middle, p10=p10, p90=p90)


def sum_clusters(values: Sequence[float], clusters: Sequence[Hashable]) -> tuple[Floats, Floats]:
    """Return the sums (K,) and numbers (K,) of the values of K clusters. clusters: cluster of each value."""
    array, sizes, cluster_indices = _group_values(values, clusters)
    return np.bincount(cluster_indices, array, minlength=len(sizes)).astype(np.float64), sizes


def _group_values(values: Sequence[float], clusters: Sequence[Hashable] | None) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Return the values (N,) as an array, the sizes (K,) of the clusters, and the cluster index (N,) of each value.

    Raises ValueError if `values` and `clusters` differ in length.
    """
    array = np.asarray(values, dtype=np.float64)
    numbers: dict[Hashable, int] = {}
    indices = [numbers.setdefault(name, len(numbers)) for name in (range(len(array)) if clusters is None else clusters)]
    if len(indices) != len(array):
        raise ValueError(f"{len(array)} values and {len(indices)} clusters: each value needs the cluster that it belongs to")
    index = np.array(indices, dtype=np.int64)
    return array, np.bincount(index).astype(np.float64), index


def _estimate_effective_number(array: Floats, sizes: Floats, clusters: NDArray[np.int64]) -> float:
    """Return the effective number of examples that `estimate_share` describes.

    For a share p near 0 or 1, few clusters show little of their variation, and the analysis of variance underestimates the
    correlation. Therefore the sum of squares between clusters is computed as if there were further clusters of average size:
    `PSEUDO_CLUSTERS` (2 p - 1)^2 clusters in which every example succeeds, and equally many in which every example fails. The
    ratio of quantiles, which `estimate_share` describes, is taken for the t distribution with 2 (K - 1) degrees of freedom, where
    K is the number of clusters.

    array: (N,), values in [0, 1]. sizes: (K,), number of values of each cluster. clusters: (N,), index of each value's cluster.
    """
    total, count = float(sizes.sum()), len(sizes)
    minimum = total**2 / float((sizes**2).sum())
    if count == total or count < MIN_CORRELATION_CLUSTERS or np.ptp(array) == 0:
        return minimum
    value, means = float(array.mean()), np.bincount(clusters, array) / sizes
    added = PSEUDO_CLUSTERS * (2 * value - 1) ** 2 * total / minimum * (value**2 + (1 - value) ** 2)
    between = (float((sizes * (means - value) ** 2).sum()) + added) / (count - 1)
    within = float(((array - means[clusters]) ** 2).sum()) / (total - count)
    typical = (total - total / minimum) / (count - 1)
    whole = between + (typical - 1) * within
    correlation = min(max((between - within) / whole, 0.0), 1.0) if whole > 0 else 1.0
    known = (norm.ppf(0.5 + CONFIDENCE_LEVEL / 2) / t.ppf(0.5 + CONFIDENCE_LEVEL / 2, 2 * (count - 1))) ** 2
    return max(float(known) * min(total / (1 + (total / minimum - 1) * correlation), total), minimum)


def compute_errors(totals: Floats, sizes: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Return means and cluster-robust standard errors (B,) of B resamples.

    totals, sizes: (K,), sum and number of the values of each of K clusters. times: (B, K), how often each resample contains each
    cluster.
    """
    count = times.shape[1]
    size = (times * sizes).sum(axis=1)
    means = (times * totals).sum(axis=1) / size
    residual = (times * (totals - means[:, None] * sizes) ** 2).sum(axis=1)
    return means, np.sqrt(count / (count - 1) * residual) / size


def _compute_quantiles(totals: Floats, sizes: Floats, value: float, error: float, level: float) -> tuple[float, float]:
    """Return the lower and upper quantile of (mean* - mean) / error* over resampled clusters (Efron 1981; Hall 1988).

    mean* and error* are the mean and the standard error of a resample. error* is taken as at least 0.3 times `error`, since with
    few clusters some resamples contain nearly only copies of one cluster. totals, sizes: as in `compute_errors`. value, error:
    mean and standard error of the sample. The quantiles are at (1 - level) / 2 and (1 + level) / 2.
    """
    means, errors = compute_errors(totals, sizes, _draw_resamples(len(sizes)))
    ratio = (means - value) / np.maximum(errors, 0.3 * error)
    below, above = np.quantile(ratio, [0.5 - level / 2, 0.5 + level / 2])
    return float(below), float(above)


@lru_cache(maxsize=32)
def _draw_resamples(count: int) -> Floats:
    """Return how often each of `count` clusters occurs in each resample, (NUM_RESAMPLES, count), drawn with a fixed seed."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=NUM_RESAMPLES).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class ConfidenceQuality:
    """How well confidences agree with what was recovered.

    decided: number of confidences. auroc: probability that a recovered example has a higher confidence than one that was not
    recovered, where a tie counts half; None if all or no examples are recovered. error: expected calibration error: the absolute
    difference of mean confidence and share recovered in each of `CONFIDENCE_BINS` bins of confidence, averaged with the number of
    examples in each bin as weight.
    """

    decided: int
    auroc: float | None
    error: float


def judge_confidence(pairs: Sequence[tuple[float, bool]]) -> ConfidenceQuality | None:
    """Compare confidences in [0, 1] with success, given pairs of confidence and whether the example was recovered.

    The result is None if there are no pairs.
    """
    if not pairs:
        return None
    values = np.array([confidence for confidence, _ in pairs])
    right = np.array([recovered for _, recovered in pairs])
    bins = np.minimum((values * CONFIDENCE_BINS).astype(np.int64), CONFIDENCE_BINS - 1)
    gaps = np.abs(np.bincount(bins, values - right, minlength=CONFIDENCE_BINS))
    ranks, count = rankdata(values), int(right.sum())
    pairs_of_both = count * (len(right) - count)
    auroc = float(ranks[right].sum() - count * (count + 1) / 2) / pairs_of_both if pairs_of_both else None
    return ConfidenceQuality(decided=len(pairs), auroc=auroc, error=float(gaps.sum() / len(pairs)))
