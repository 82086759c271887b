"""Significance tests of an attack against its null, the attack without update, and the smallest leaks that they can detect.

A case is the observations that are attacked together: one round of a client, or several. A cluster is a set of examples that are
connected by common cases.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from math import sqrt
from typing import Any

import numpy as np
from scipy.stats import binom, chi2, hypergeom, norm, t

from attacker.scoring.row_pairs import RowPairs
from attacker.scoring.rows import ScoreRow
from attacker.scoring.statistics import compute_errors, mean, sum_clusters

MAX_ENUMERATED_CLUSTERS = 14
"""Largest number of clusters for which the sign-flip test enumerates all signs; with more, signs are drawn at random."""
SIGN_DRAWS = 1 << MAX_ENUMERATED_CLUSTERS
"""Number of random draws of signs."""
MAX_DRAWN_CLUSTERS = 200
"""Largest number of clusters for which signs are drawn; with more, the normal approximation is used."""
TEST_POWER = 0.95
"""Power: probability with which a leak called detectable is detected."""


def adjust_for_multiple_tests(values: Sequence[float]) -> list[float]:
    """Return the p-values of several tests in the order of `values`, adjusted for multiple testing (Holm 1979)."""
    order, largest = sorted(range(len(values)), key=lambda i: values[i]), 0.0
    adjusted = [0.0] * len(values)
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - place) * values[i]))
        adjusted[i] = largest
    return adjusted


def run_t_test(values: Sequence[float], groups: Sequence[Hashable]) -> float:
    """Return the p-value of a one-sided t-test for a mean above 0, with cluster-robust standard error.

    values: attack minus null of each example. groups: cluster of each example; at least two clusters. If the standard error is 0,
    the p-value is 0 for a positive mean and 1 for any other mean.
    """
    centre, error, count = _compute_mean_and_error(values, groups)
    if error == 0:
        return 0.0 if centre > 0 else 1.0
    return float(t.sf(centre / error, count - 1))


def _compute_mean_and_error(values: Sequence[float], groups: Sequence[Hashable]) -> tuple[float, float, int]:
    """Return the mean over examples, its cluster-robust standard error, and the number of clusters, which is at least two."""
    sums, sizes = sum_clusters(values, groups)
    means, errors = compute_errors(sums, sizes, np.ones((1, len(sums))))
    return float(means[0]), float(errors[0]), len(sums)


def run_sign_flip_test(values: Sequence[float], groups: Sequence[Hashable]) -> float:
    """Return the p-value of a one-sided sign-flip test for a sum above 0, which flips the signs of whole clusters.

    Clusters whose sum is 0 are ignored, and the p-value is 1 if no cluster is left. If at most `MAX_ENUMERATED_CLUSTERS` are
    left, all flips are enumerated; if at most `MAX_DRAWN_CLUSTERS`, `SIGN_DRAWS` flips are drawn with a fixed seed; otherwise the
    normal approximation is used. values: attack minus null of each example. groups: cluster of each example.
    """
    sums, _ = sum_clusters(values, groups)
    sums = sums[np.abs(sums) > 1e-12]
    if not len(sums):
        return 1.0
    if len(sums) <= MAX_ENUMERATED_CLUSTERS:
        signs = 1 - 2.0 * ((np.arange(1 << len(sums))[:, None] >> np.arange(len(sums))) & 1)
        return float((signs @ sums >= sums.sum() - 1e-9).mean())
    if len(sums) > MAX_DRAWN_CLUSTERS:
        return float(norm.sf(sums.sum() / sqrt(float((sums**2).sum()))))
    drawn = np.random.default_rng(0).integers(0, 2, size=(SIGN_DRAWS, len(sums))) * 2.0 - 1
    return float((1 + (drawn @ sums >= sums.sum() - 1e-9).sum()) / (1 + SIGN_DRAWS))


def run_reidentification_test(pairs: RowPairs, clusters: Mapping[Any, int]) -> dict[str, Any] | None:
    """Test whether reconstructions are nearer to their originals than to other examples.

    The test takes `ScoreRow.case_chance`, the probability that random other examples are as near to a case's reconstructions.
    Without a leak, this probability is about uniform. Its normal scores are averaged within clusters and summed over clusters
    (Stouffer 1949). The null's own sum is subtracted if it is positive, since originals may differ from the other examples.

    Returns a dict: `attack` and `null`, the means of `rank_share`, the share of other examples that are nearer to the
    reconstruction than its original (0 is best); `difference`, the estimated mean of attack minus null; and the one-sided p-value
    `p`. Returns None if no row of the attack or no row of the null has `case_chance`, or if no example has `rank_share` in both.
    clusters: as in `RowPairs.clusters`.
    """
    attack_score, null_score = _sum_normal_scores(pairs.attack, clusters), _sum_normal_scores(pairs.null, clusters)
    ranks, others = pairs.compute_differences("rank_share"), pairs.null
    if attack_score is None or null_score is None or not ranks:
        return None
    groups = [clusters[index] for index in ranks]
    attack = [row.rank_share for row in pairs.attack if row.rank_share is not None]
    null = [row.rank_share for row in others if row.rank_share is not None]
    return {
        "attack": sum(attack) / len(attack),
        "null": sum(null) / len(null),
        "difference": mean(list(ranks.values()), groups),
        "p": float(norm.sf(attack_score - max(null_score, 0.0))),
    }


def _sum_normal_scores(rows: Sequence[ScoreRow], clusters: Mapping[Any, int]) -> float | None:
    """Return the sum of the normal scores of K clusters, divided by sqrt(K); None if no row has a `case_chance`.

    The normal score of a case is the standard normal quantile of 1 - `case_chance`, so that it is large if the chance is small.
    The score of a cluster is the mean over its cases; without a leak, its variance is about 1 or less. clusters: as in
    `RowPairs.clusters`.
    """
    cases = {row.case: (clusters[row.index], row.case_chance) for row in rows if row.case_chance is not None}
    scores_by_cluster: dict[int, list[float]] = defaultdict(list)
    for cluster, chance in cases.values():
        scores_by_cluster[cluster].append(float(norm.isf(chance)))
    if not scores_by_cluster:
        return None
    return sum(sum(differences) / len(differences) for differences in scores_by_cluster.values()) / sqrt(len(scores_by_cluster))


def bound_single_example(pairs: RowPairs) -> float | None:
    """Return a p-value for a leak of at least one example; None if no row of the attack has a `chance`.

    The p-value is the smallest chance after the correction by the null (`correct_chance`), times the number of rows with a
    chance (Bonferroni), and at most 1.
    """
    chances = [
        chance for row, other in zip(pairs.attack, pairs.null, strict=True) if (chance := correct_chance(row, other)) is not None
    ]
    return min(1.0, len(chances) * min(chances)) if chances else None


def correct_chance(row: ScoreRow, null: ScoreRow) -> float | None:
    """Return `chance` of the attack's `row` divided by `chance` of the null's row `null`; at most 1, None if `row` has none.

    `chance` is an estimated upper bound on the probability of being this near to the original without information. An original in
    the middle of its data is close to any reconstruction, which the division corrects. The attack's chance is returned unchanged
    if the null has none, or if the attack recovers the example and the null does not.
    """
    if row.chance is None or null.chance is None or (row.success and not null.success):
        return row.chance
    return max(row.chance, min(1.0, row.chance / null.chance))


def find_detectable_mean(values: Sequence[float], groups: Sequence[Hashable], level: float) -> float:
    """Estimate the smallest mean difference that the t-test at `level` detects with probability `TEST_POWER`.

    values: sample from which the spread of differences is estimated. groups: cluster of each value; at least two clusters.

    The standard error is replaced by the upper limit of its one-sided 90 % confidence interval, since few clusters determine it
    poorly. level: significance level of the test.
    """
    _, error, count = _compute_mean_and_error(values, groups)
    wide = error * sqrt((count - 1) / chi2.ppf(0.1, count - 1))
    return float((t.isf(level, count - 1) + t.ppf(TEST_POWER, count - 1)) * wide)


def run_fisher_test(attack: Sequence[float], null: Sequence[float]) -> float:
    """Return the p-value of Fisher's exact test, one-sided, that the attack has more successes than the null.

    attack, null: success of attack and null on the same independent examples, 0 or 1. The test uses only the two numbers of
    successes, and ignores which examples succeeded.
    """
    count, more, less = len(attack), sum(value > 0.5 for value in attack), sum(value > 0.5 for value in null)
    return float(hypergeom.sf(more - 1, 2 * count, more + less, count))


def find_detectable_successes(null: Sequence[float], level: float) -> float | None:
    """Return the smallest difference of shares, attack minus null, that `run_fisher_test` detects with probability `TEST_POWER`.

    The null's successes are taken as given. The attack's share is found in steps of 0.001. The result is None if even an attack
    that recovers every example is not detected. null: success of the null on each example, 0 or 1. level: significance level.
    """
    count, less = len(null), sum(value > 0.5 for value in null)
    needed = np.arange(less, count + 1)
    shown = needed[hypergeom.sf(needed - 1, 2 * count, needed + less, count) <= level]
    if not len(shown):
        return None
    shares = np.arange(1, 1001) / 1000
    enough = shares[binom.sf(shown[0] - 1, count, shares) >= TEST_POWER]
    return float(enough[0]) - less / count if len(enough) else None


@lru_cache(maxsize=256)
def find_detectable_share(null: float, examples: int, clusters: int, level: float) -> float | None:
    """Return by how much the attack's share must exceed the null's for a sign test over clusters to detect it.

    Detected means with probability `TEST_POWER`. The result is None if even an attack that recovers everything is not detected.
    The sign test counts the examples that only one of attack and null recovered; the probability of such an example is computed
    as if attack and null succeeded independently. The attack's share is found on a grid of 40 steps from the null's share to 1.

    null: share of `examples` examples that the null recovered; one success and one failure are added to it (Laplace). clusters:
    number of clusters; each is treated as one example, and at most 200 count. level: significance level.
    """
    count, minimum = min(clusters, 200), (null * examples + 1) / (examples + 2)
    differing = np.arange(count + 1)
    critical = binom.isf(level, differing, 0.5)
    for share in np.linspace(minimum, 1, 41)[1:]:
        more, less = share * (1 - minimum), minimum * (1 - share)
        weights = binom.pmf(differing, count, more + less)
        power = float((weights * binom.sf(critical, differing, more / (more + less)))[1:].sum())
        if power >= TEST_POWER:
            return float(share - minimum)
    return None
