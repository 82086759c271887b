"""Verdict on an attack: whether its scores are better than those of its null on the same examples, and its wording."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from attacker.scoring.row_pairs import RowPairs, average_by_example, pair_rows
from attacker.scoring.rows import ScoreRow
from attacker.scoring.score_tests import REIDENTIFIED, SIGNIFICANCE_LEVEL, SINGLE, Comparison, compare_scores
from attacker.scoring.significance import correct_chance

Outcome = Literal["recovered", "partly leaked", "not distinguishable from the null at this sample", "no verdict"]
FAILED_REASON = "the attack failed in every case"


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
        return tuple(comparison for comparison in self.comparisons if comparison.leaks)

    @property
    def detectable(self) -> Mapping[str, float]:
        """Return a dict from the name of a score to `Comparison.detectable`, for the scores for which it is known."""
        return {comparison.score: comparison.detectable for comparison in self.comparisons if comparison.detectable is not None}

    @property
    def words(self) -> str:
        """Return the verdict as text without a full stop: the outcome, and the numbers or the reason behind it."""
        if self.outcome == "no verdict":
            return f"no verdict: {self.reason}"
        if self.outcome == "recovered":
            flat = f", {self.flat} of them nearly of one colour" if self.flat else ""
            recovered = f"{self.recovered} of {_format_count(self.examples)}{flat}; the null recovered {self.null_recovered}"
            others = [comparison.words for comparison in self.leaked if comparison.score not in (SINGLE, "success", REIDENTIFIED)]
            return "; ".join((f"recovered: {recovered}", *others))
        if self.outcome == "partly leaked":
            return f"partly leaked: {'; '.join(comparison.words for comparison in self.leaked)}"
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
        """Return the verdict as JSON values: its fields, and the properties `words`, `leaks` and `detectable`."""
        return {**asdict(self), "words": self.words, "leaks": self.leaks, "detectable": dict(self.detectable)}


def _format_count(count: int) -> str:
    return f"{count:,} example{'s' * (count != 1)}"


def _format_detectable(verdict: Verdict) -> str:
    """Return a clause on the mean differences between attack and null that the tests may have missed.

    Scores that are shares are left out. If no other score has a known `Comparison.detectable`, the clause says that with so few
    cases, only a recovered example or one much nearer to its original than the null's reconstruction shows a leak, or why the
    recovered ones show none.
    """
    sizes = {
        comparison.score: comparison
        for comparison in verdict.comparisons
        if comparison.detectable is not None and comparison.unit != "%"
    }
    differences = [_format_size(comparison) for comparison in sizes.values()]
    if differences:
        return f"a mean difference of less than {' or '.join(differences)} may have gone unnoticed"
    if verdict.recovered > verdict.null_recovered:
        return "a recovered example shows a leak only if the data set holds enough others to tell it from chance"
    return "so few cases show a leak only if an example is recovered, or is much nearer to its original than the null's answer is"


def _format_size(comparison: Comparison) -> str:
    assert comparison.detectable is not None
    if comparison.unit == "%":
        return f"{comparison.detectable:.0%} of {comparison.title}"
    if comparison.unit == " dB":
        return f"{max(comparison.detectable, 0.1):.1f} dB {comparison.title}"
    return f"{max(comparison.detectable, 0.01):.2f} {comparison.title}"


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
    compared = compare_scores(pairs, clusters)
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
        outcome, reason = "no verdict", "the data set holds no other examples to compare reconstructions with"
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


def _has_chances(pairs: RowPairs) -> bool:
    """Return whether a reconstruction has a `ScoreRow.chance`, or none exists. Small data sets give no chances."""
    answered = [row for row in pairs.attack if row.failure is None]
    return not answered or any(row.chance is not None for row in answered)


def _has_recovered(pairs: RowPairs, compared: Sequence[Comparison]) -> bool:
    """Return whether a leak, which some comparison shows, includes recovered examples, and not only better scores.

    It does if the attack recovers significantly more examples than the null does (the comparison of `success` shows a leak). It
    also does if the attack recovers an example with a smaller error than the null's, and its chance (`correct_chance`) is at most
    `SIGNIFICANCE_LEVEL`, divided by the number of rows with a chance and by the number of comparisons (Bonferroni). The null may
    recover such an example as well: with little contrast, an image of one colour is near enough. If no row has `chance`, because
    the data set is no larger than a case, the number of examples recovered by the attack minus the number recovered by the null
    must exceed half the number of compared examples.
    """
    if any(comparison.leaks and comparison.score == "success" for comparison in compared):
        return True
    level = SIGNIFICANCE_LEVEL / len(compared)
    answered = [row for row in pairs.attack if row.chance is not None]
    for row, other in zip(pairs.attack, pairs.null, strict=True):
        chance = correct_chance(row, other)
        is_nearer = not other.success or (row.mse is not None and other.mse is not None and row.mse < other.mse)
        if row.success and is_nearer and chance is not None and chance * len(answered) <= level:
            return True
    if answered:
        return False
    attack, null = average_by_example(pairs.attack, "success"), average_by_example(pairs.null, "success")
    return sum(attack.values()) - sum(null.values()) > len(attack) / 2  # without `chance`, more than half must be recovered
