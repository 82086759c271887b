"""Verdict on an attack: statistical comparison of its scores with the scores of its null on the same examples."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from typing import Any, Literal

from attacker.scoring.row_pairs import PSNR_OF_8_BITS, RowPairs, average_by_example, pair_rows
from attacker.scoring.rows import ScoreRow
from attacker.scoring.significance import (
    adjust_for_multiple_tests,
    bound_single_example,
    correct_chance,
    find_detectable_mean,
    find_detectable_share,
    find_detectable_successes,
    run_fisher_test,
    run_reidentification_test,
    run_sign_flip_test,
    run_t_test,
)
from attacker.scoring.statistics import Estimate, mean

Outcome = Literal["recovered", "partly leaked", "not distinguishable from the null at this sample", "no verdict"]
FAILED_REASON = "the attack failed in every case"
SIGNIFICANCE_LEVEL = 0.05
"""Significance level: probability of reporting a leak if there is none, over all compared scores together."""
MIN_CLUSTERS = 3
"""Smallest number of clusters for which mean differences are tested."""
CONTROLS = {"lpips": "other_lpips"}
"""Scores that depend on the texture of images whatever they show, and the field that holds the same score for what the attack
found in another client's update. LPIPS of a smooth image is large for any original, and noise alone lowers it, so that a noisy
answer is better than the null's smooth one without any leak."""


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


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of comparing an attack with its null, the same attack without the update.

    outcome: "recovered" if the attack shows a leak and recovers examples beyond what its null and chance explain, "partly leaked"
    if only other scores show a leak, "not distinguishable from the null at this sample" if no score does. It is "no verdict" if
    no case is finished, all cases failed or the null is missing, or if no score shows a leak and the null covers only some of the
    examples or the rows are too old for a test.
    comparisons: one per tested score. examples, clusters: number of distinct examples compared, and of the independent groups
    that they form.
    recovered, null_recovered: how many of these examples the attack and the null recovered (`ScoreRow.success`) at least once.
    flat: how many of the examples that the attack recovered are nearly of one colour.
    reason: why the outcome is "no verdict"; "" for other outcomes.
    """

    outcome: Outcome
    comparisons: tuple[Comparison, ...] = ()
    examples: int = 0
    clusters: int = 0
    recovered: int = 0
    null_recovered: int = 0
    flat: int = 0
    reason: str = ""

    @property
    def leaks(self) -> bool:
        """Return whether any comparison shows a leak, so that the outcome is "recovered" or "partly leaked"."""
        return self.outcome in ("recovered", "partly leaked")

    @property
    def leaked(self) -> tuple[Comparison, ...]:
        """Return the comparisons that show a leak (`Comparison.leaks`)."""
        return tuple(one for one in self.comparisons if one.leaks)

    @property
    def detectable(self) -> Mapping[str, float]:
        """Return a dict from the name of a score to `Comparison.detectable`, for the scores for which it is known."""
        return {one.score: one.detectable for one in self.comparisons if one.detectable is not None}

    @property
    def words(self) -> str:
        """Return the verdict as text without a full stop: the outcome, and the numbers or the reason behind it."""
        if self.outcome == "no verdict":
            return f"no verdict: {self.reason}"
        if self.outcome == "recovered":
            flat = f", {self.flat} of them nearly of one colour" if self.flat else ""
            recovered = f"{self.recovered} of {_format_count(self.examples)}{flat}; the null recovered {self.null_recovered}"
            return f"recovered: {recovered}{_format_leaked(self.leaked)}"
        if self.outcome == "partly leaked":
            return f"partly leaked: {'; '.join(one.words for one in self.leaked)}"
        details = (
            f"{self._sample} were compared with the null, the same attack without the update; the attack recovered "
            f"{self.recovered} and the null {self.null_recovered}; {_format_detectable(self)}"
        )
        return f"not distinguishable from the null at this sample: {details}"

    @property
    def caveat(self) -> str:
        """Return a clause on the number of compared examples, and on the mean differences that may have gone unnoticed."""
        return f"{self._sample} were compared; {_format_detectable(self)}"

    @property
    def _sample(self) -> str:
        return f"{_format_count(self.examples)} in {self.clusters} independent group{'s' * (self.clusters != 1)}"

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a dict that can be written as JSON.

        Its keys are the names of the fields and of the properties `words`, `leaks` and `detectable`.
        """
        return {**asdict(self), "words": self.words, "leaks": self.leaks, "detectable": dict(self.detectable)}


def _format_count(count: int) -> str:
    return f"{count:,} example{'s' * (count != 1)}"


def _format_leaked(leaked: Sequence[Comparison]) -> str:
    scores = [one.words for one in leaked if one.score not in (SINGLE, "success", REIDENTIFIED)]
    return f"; {'; '.join(scores)}" if scores else ""


def _format_detectable(verdict: Verdict) -> str:
    """Return a clause on the mean differences between attack and null that the tests may have missed.

    Scores that are shares are left out. If no other score has a known `Comparison.detectable`, the clause says that with so few
    cases, only a recovered example or one much nearer to its original than the null's reconstruction shows a leak.
    """
    sizes = {one.score: one for one in verdict.comparisons if one.detectable is not None and one.unit != "%"}
    differences = [_format_size(one) for one in sizes.values()]
    if differences:
        return f"a mean difference of less than {' or '.join(differences)} may have gone unnoticed"
    return "so few cases show a leak only if an example is recovered, or is much nearer to its original than the null's answer is"


def _format_size(one: Comparison) -> str:
    assert one.detectable is not None
    if one.unit == "%":
        return f"{one.detectable:.0%} of {one.title}"
    if one.unit == " dB":
        return f"{max(one.detectable, 0.1):.1f} dB {one.title}"
    return f"{max(one.detectable, 0.01):.2f} {one.title}"


def judge_attack(rows: Sequence[ScoreRow], null: Sequence[ScoreRow]) -> Verdict:
    """Return the verdict on an attack, from tests of its scores against the scores of its null (the attack without update).

    rows, null: score rows of finished cases (`ScoreRow.is_finished`), of the attack and of its null; either may be empty.
    """
    if not rows:
        return Verdict(outcome="no verdict", reason="no case is finished")
    if not null:
        return Verdict(outcome="no verdict", reason="no null was run on these cases")
    pairs = pair_rows(rows, null)
    if not pairs.attack:
        return Verdict(outcome="no verdict", reason="the null was run on other cases")
    clusters = pairs.clusters
    compared = _compare_scores(pairs, clusters)
    outcome: Outcome = "not distinguishable from the null at this sample"
    reason = ""
    successes, null_successes = average_by_example(pairs.attack, "success"), average_by_example(pairs.null, "success")
    if all(row.state == "failed" for row in rows):
        outcome, reason = "no verdict", FAILED_REASON
    elif any(comparison.leaks for comparison in compared):
        outcome = "recovered" if _has_recovered(pairs, compared) else "partly leaked"
    elif len(pairs.attack) < len(rows):
        outcome, reason = "no verdict", f"the null was run on only {len(pairs.attack)} of {len(rows)} examples"
    elif not _has_chances(pairs) and (not compared or sum(successes.values()) > sum(null_successes.values())):
        outcome, reason = (
            "no verdict",
            "the scores come from an earlier version without the test of single examples; run attacker score again",
        )
    return Verdict(
        outcome=outcome,
        comparisons=compared,
        examples=len(clusters),
        clusters=len(set(clusters.values())),
        recovered=sum(value > 0 for value in successes.values()),
        null_recovered=sum(value > 0 for value in null_successes.values()),
        flat=len({row.index for row in pairs.attack if row.success and row.flat}),
        reason=reason,
    )


def _compare_scores(pairs: RowPairs, clusters: Mapping[Any, int]) -> tuple[Comparison, ...]:
    """Test each score of `COMPARED_SCORES`, re-identification and single examples; return their comparisons.

    The p-values are adjusted for the number of tests. A score is left out if fewer than `MIN_CLUSTERS` clusters have it or, for
    the scores in `CONTROLS`, its control, and `label_success` also if an oracle supplied the labels. A score with a control must
    be better than both the null's and the control. The tests of re-identification and of single examples are left out if
    the rows have no `case_chance` or no `chance`, see `run_reidentification_test` and `bound_single_example`. clusters: dict from
    an example's index to its cluster.
    """
    found: list[dict[str, Any]] = []
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
        found.append(
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
        found.append({"score": REIDENTIFIED, "title": "re-identification", "unit": "", **test})
    if (p := bound_single_example(pairs)) is not None:
        nothing = {"attack": None, "null": None, "difference": None}
        found.append({"score": SINGLE, "title": "single examples", "unit": "", **nothing, "p": p})
    return tuple(
        _make_comparison(one, adjusted, len(found))
        for one, adjusted in zip(found, adjust_for_multiple_tests([f["p"] for f in found]), strict=True)
    )


def _test_means(signed: Sequence[float], groups: Sequence[int]) -> dict[str, Any]:
    """Test whether the mean difference is positive; return a dict of the p-value `p` and a function `least`.

    `least` maps a significance level to the smallest mean difference that the test would detect with probability 0.95. signed:
    difference of attack and null for each example, positive if the attack is better. groups: cluster of each example.
    """
    return {"p": run_t_test(signed, groups), "least": partial(find_detectable_mean, signed, groups)}


def _require_all(tests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return `p` and `least`, as in `_test_means`, of the test that rejects if all `tests` do (intersection-union test)."""
    if len(tests) == 1:
        return dict(tests[0])
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


def _make_comparison(found: Mapping[str, Any], adjusted: float, tests: int) -> Comparison:
    detectable = found["least"](SIGNIFICANCE_LEVEL / tests) if "least" in found else None
    if detectable is not None and detectable > found["span"]:
        detectable = None
    kept = {key: value for key, value in found.items() if key not in ("least", "span")}
    return Comparison(**kept, adjusted=adjusted, leaks=adjusted <= SIGNIFICANCE_LEVEL, detectable=detectable)


def _compute_mean(values: Mapping[int, float], chosen: Mapping[int, float]) -> float:
    return sum(values[index] for index in chosen) / len(chosen)


def _has_chances(pairs: RowPairs) -> bool:
    """Return False if the attack's rows are of an earlier version, which did not compute `ScoreRow.chance`, and True otherwise.

    `chance` is an upper bound on the probability of a reconstruction this near to its original without information. The result is
    also True if no row has a reconstruction, since the version cannot be told then.
    """
    answered = [row for row in pairs.attack if row.failure is None]
    return not answered or any(row.chance is not None for row in answered)


def _has_recovered(pairs: RowPairs, compared: Sequence[Comparison]) -> bool:
    """Return whether a leak, which some comparison shows, includes recovered examples, and not only better scores.

    It does if the attack recovers significantly more examples than the null does (the comparison of `success` shows a leak). It
    also does if the attack recovers an example with a smaller error than the null's, and its chance (`correct_chance`) is at most
    `SIGNIFICANCE_LEVEL`, divided by the number of rows with a chance and by the number of comparisons (Bonferroni). The null may
    recover such an example as well: with little contrast, an image of one colour is near enough. If no row has `chance`, as in
    earlier versions, the number of examples recovered by the attack minus the number recovered by the null must exceed half the
    number of compared examples.
    """
    if any(one.leaks and one.score == "success" for one in compared):
        return True
    level = SIGNIFICANCE_LEVEL / len(compared)
    answered = [row for row in pairs.attack if row.chance is not None]
    for one, other in zip(pairs.attack, pairs.null, strict=True):
        chance = correct_chance(one, other)
        is_nearer = not other.success or (one.mse is not None and other.mse is not None and one.mse < other.mse)
        if one.success and is_nearer and chance is not None and chance * len(answered) <= level:
            return True
    if answered:
        return False
    attack, null = average_by_example(pairs.attack, "success"), average_by_example(pairs.null, "success")
    return sum(attack.values()) - sum(null.values()) > len(attack) / 2  # without `chance`, more than half must be recovered
