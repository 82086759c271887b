"""Tests of an attack's scores against the scores of its null, the same attack without the update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from attacker.scoring.row_pairs import PSNR_OF_8_BITS, RowPairs, average_by_example
from attacker.scoring.significance import (
    adjust_for_multiple_tests,
    bound_single_example,
    find_detectable_mean,
    find_detectable_share,
    find_detectable_successes,
    run_fisher_test,
    run_reidentification_test,
    run_sign_flip_test,
    run_t_test,
)
from attacker.scoring.statistics import Estimate, mean

SIGNIFICANCE_LEVEL = 0.05
"""Significance level: probability of reporting a leak if there is none, over all compared scores together."""
MIN_CLUSTERS = 3
"""Smallest number of clusters for which mean differences are tested."""
CONTROLS = {"lpips": "other_lpips", "categorical_right": "other_categorical_right"}
"""Scores that noise alone improves, and the field that holds the same score for what the attack found in another client's update.
LPIPS of a smooth image is large for any original, and noise lowers it. A null's row of one value names no category, and noise
names some by chance. So a noisy answer is better than the null's without any leak."""


@dataclass(frozen=True)
class Score:
    """A score that is compared between attack and null.

    name: field of `ScoreRow`. title: its name in printed text. sign: 1 if a higher score is nearer to the original, -1 if a lower
    score is. span: largest possible difference of two mean scores. unit: suffix of printed values. is_share: whether the score of
    a row is 1 for a success and 0 otherwise, so that its mean is a share.
    """

    name: str
    title: str
    sign: int
    span: float = 1.0
    unit: str = ""
    is_share: bool = False


COMPARED_SCORES = (
    Score("psnr", "PSNR", 1, PSNR_OF_8_BITS, " dB"),
    Score("ssim", "SSIM", 1, 2.0),
    Score("lpips", "LPIPS", -1, inf),
    Score("continuous_error", "continuous error", -1),
    Score("categorical_right", "categories", 1),
    Score("label_success", "labels", 1, is_share=True),
    Score("success", "recovered examples", 1, is_share=True),
)
REIDENTIFIED, SINGLE = "reidentification", "single"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of one score of an attack with its null, the same attack without the update.

    score, title: name of the score in code and in printed text. unit: suffix of printed values; "%" for shares, which are stored
    in [0, 1].
    attack, null: mean over examples; for re-identification, mean share of other examples that are nearer to the reconstruction
    than the original is. None for the test of single examples, which compares no means.
    difference: mean of attack minus null, with its confidence interval over clusters; None for the test of single examples. An
    attack that beats its null has a negative difference in scores of which smaller values are better (`Score.sign` is -1, and
    re-identification).
    p: one-sided p-value for the attack being better than its null. adjusted: p-value adjusted for the number of compared scores
    (Holm 1979).
    leaks: whether `adjusted` is at most `SIGNIFICANCE_LEVEL`.
    detectable: estimate of the smallest difference in favour of the attack, as a positive number, that the test on a sample like
    this one reports as a leak with probability 0.95. None if not even the largest possible difference (`Score.span`), or the
    recovery of every example, would be reported as a leak. None also for re-identification and single examples.
    """

    score: str
    title: str
    unit: str
    attack: float | None
    null: float | None
    difference: Estimate | None
    p: float
    adjusted: float
    leaks: bool
    detectable: float | None = None

    @property
    def words(self) -> str:
        """Return the comparison as text: the means for attack and null, and for PSNR also the interval of their difference.

        For the test of single examples, which compares no means, the text states its finding.
        """
        if self.score == SINGLE:
            return "single reconstructions nearer to their originals than chance and the null explain"
        if self.attack is None or self.null is None or self.difference is None:
            return self.title
        if self.score == REIDENTIFIED:
            nearer = (
                f"{self.attack:.0%} of other examples are nearer to the reconstruction than its original is, {self.null:.0%} for "
                "the null"
            )
            return f"re-identification ({nearer})"
        if self.unit == " dB":
            d = self.difference
            what = "95 % interval of the mean difference" if d.is_interval else "differences of single examples"
            return f"{self.title} {self.attack:.1f} dB against {self.null:.1f} dB ({what}: {d.low:.1f} to {d.high:.1f} dB)"
        if self.unit == "%":
            return f"{self.title} {self.attack:.0%} against {self.null:.0%}"
        return f"{self.title} {self.attack:.2f} against {self.null:.2f}"


def compare_scores(pairs: RowPairs, clusters: Mapping[Any, int]) -> tuple[Comparison, ...]:
    """Test each score of `COMPARED_SCORES`, re-identification and single examples; return their comparisons.

    The p-values are adjusted for the number of tests. A score is left out if fewer than `MIN_CLUSTERS` clusters have it or, for
    the scores in `CONTROLS`, its control, and `label_success` also if an oracle supplied the labels. A score with a control must
    be better than both the null's and the control. The tests of re-identification and of single examples are left out if
    the rows have no `case_chance` or no `chance`, see `run_reidentification_test` and `bound_single_example`. clusters: dict from
    an example's index to its cluster.
    """
    tested: list[dict[str, Any]] = []
    oracles = pairs.attack[0].oracles
    for score in COMPARED_SCORES:
        differences = pairs.compute_differences(score.name)
        if not differences or (score.name == "label_success" and "labels" in oracles):
            continue
        values, groups = list(differences.values()), [clusters[index] for index in differences]
        count = len(set(groups))
        if count < MIN_CLUSTERS:
            continue
        signed = [score.sign * value for value in values]
        tests = [_test_shares(pairs, score.name, differences, groups) if score.is_share else _test_means(signed, groups)]
        if score.name in CONTROLS:
            beyond = pairs.compute_differences_from(score.name, CONTROLS[score.name])
            own_groups = [clusters[index] for index in beyond]
            if len(set(own_groups)) < MIN_CLUSTERS:
                continue
            tests.append(_test_means([score.sign * value for value in beyond.values()], own_groups))
        tested.append(
            {
                "score": score.name,
                "title": score.title,
                "unit": "%" if score.is_share else score.unit,
                "span": score.span,
                "attack": _compute_mean(average_by_example(pairs.attack, score.name), differences),
                "null": _compute_mean(average_by_example(pairs.null, score.name), differences),
                "difference": mean(values, groups),
                **_require_all(tests),
            }
        )
    if (test := run_reidentification_test(pairs, clusters)) is not None:
        tested.append({"score": REIDENTIFIED, "title": "re-identification", "unit": "", **test})
    if (p := bound_single_example(pairs)) is not None:
        nothing = {"attack": None, "null": None, "difference": None}
        tested.append({"score": SINGLE, "title": "single examples", "unit": "", **nothing, "p": p})
    return tuple(
        _make_comparison(one, adjusted, len(tested))
        for one, adjusted in zip(tested, adjust_for_multiple_tests([f["p"] for f in tested]), strict=True)
    )


def _test_means(signed: Sequence[float], groups: Sequence[int]) -> dict[str, Any]:
    """Return `p` of a positive mean difference, and `least`: the smallest mean that a level detects with probability 0.95.

    signed: difference of attack and null for each example, positive if the attack is better. groups: cluster of each example.
    """
    return {"p": run_t_test(signed, groups), "least": partial(find_detectable_mean, signed, groups)}


def _require_all(tests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return `p` and `least`, as in `_test_means`, of the test that rejects if all `tests` do (intersection-union test)."""
    return {"p": max(test["p"] for test in tests), "least": lambda level: max(test["least"](level) for test in tests)}


def _test_shares(pairs: RowPairs, name: str, differences: Mapping[int, float], groups: Sequence[int]) -> dict[str, Any]:
    """Return a dict of `p` and `least`, as in `_test_means`, for a score that is 1 for a success of a row and 0 otherwise.

    Fisher's exact test is used if every example is its own cluster, and has a mean score of 0 or 1 over its rows both for the
    attack and for the null. Otherwise a sign-flip test is used. The function `least` returns None if no difference would be
    detected. name: field of `ScoreRow`. differences: dict from each example's index in the data set to attack minus null. groups:
    cluster of each of these examples.
    """
    attack, null = ([average_by_example(rows, name)[index] for index in differences] for rows in (pairs.attack, pairs.null))
    count = len(set(groups))
    if count == len(groups) and {*attack, *null} <= {0.0, 1.0}:
        return {"p": run_fisher_test(attack, null), "least": partial(find_detectable_successes, null)}
    least = partial(find_detectable_share, sum(null) / len(null), len(null), count)
    return {"p": run_sign_flip_test(list(differences.values()), groups), "least": least}


def _make_comparison(test: Mapping[str, Any], adjusted: float, tests: int) -> Comparison:
    detectable = test["least"](SIGNIFICANCE_LEVEL / tests) if "least" in test else None
    if detectable is not None and detectable > test["span"]:
        detectable = None
    kept = {key: value for key, value in test.items() if key not in ("least", "span")}
    return Comparison(**kept, adjusted=adjusted, leaks=adjusted <= SIGNIFICANCE_LEVEL, detectable=detectable)


def _compute_mean(values: Mapping[int, float], chosen: Mapping[int, float]) -> float:
    return sum(values[index] for index in chosen) / len(chosen)
