"""Summaries of the score rows of attacks, each with the summary of its null (the attack without the update).

A case is the observations that are attacked together: one round of a client, or several.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from statistics import fmean, median
from typing import Any

from attacker.replay.metadata_reader import make_attack_key
from attacker.scoring.row_pairs import PSNR_OF_8_BITS, average_by_example, fill_failures
from attacker.scoring.rows import ScoreRow
from attacker.scoring.states import count_cases
from attacker.scoring.statistics import (
    ConfidenceQuality,
    Distribution,
    Estimate,
    estimate_share,
    find_clusters,
    judge_confidence,
    mean,
)
from attacker.scoring.verdict import Verdict, judge_attack


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The scores of one attack on one run, with the scores of its null.

    cases: number of cases by state, see `states.CaseState`.
    examples: number of rows of finished cases (done or failed), one per example and case: an image attacked in five rounds counts
    five times here. All estimates are computed from these rows, and None if no case is finished. The rows of each distinct
    example are averaged first, so that it counts once in an estimate. Intervals are over clusters of examples that are connected
    by common cases, see `statistics`.
    success, label_success: shares of examples recovered, and of true labels recovered.
    psnr, ssim, ssim_global, lpips, mse, continuous_error, categorical_right: means over these distinct examples. An example
    without a reconstruction counts with the scores of the null's reconstruction, or of the best constant image, see
    `fill_failures`. None if no row has the measure. In means, a PSNR counts as at most 58.9 dB, see `PSNR_OF_8_BITS`.
    seconds, iterations: total wall time of done cases, and median of their numbers of iterations; each case counts once. None if
    no case is done. failures: number of rows of finished cases without a reconstruction.
    identified: share of examples whose reconstruction is so near that guesses would be as near with a probability of at most 1 %,
    see `ScoreRow.identified`.
    other_success, other_psnr, other_lpips: share and means of what the same attack recovers from another client's update, a
    second null; None if no other client was attacked.
    exact_match: share of the table rows that are matched exactly; one without a reconstruction is not. None for images.
    tag_jaccard: mean Jaccard similarity of the tags of originals and reconstructions, 0 for an original without a reconstruction.
    tagger: name of the tagger. Both are None without a tagger, see `semantic`.
    bound: mean of the lower bounds on the mean squared error. efficiency: this mean divided by the mean squared error over the
    same examples; each of the two is first raised to the error of rounding to 8 bits if it is smaller. Both are None if no bounds
    were computed.
    confidence: how well the attack's confidence distinguishes recovered examples from others; None without confidences.
    linked_right: of the examples that the attack claims to occur in several rounds, the share for which all these rounds are
    right; None if there are no such examples.
    surplus: number of reconstructed examples beyond those that finished cases can have; these, which the attack ranks lowest,
    were dropped before the comparison with originals.
    lpips_net: the backbone of LPIPS; None if LPIPS was not computed.
    routes: dict from the method that reconstructed a case, such as a closed form or a search, to the number of done cases.
    null: the summary of the null, the attack without the update, on the same finished cases; None if it has no scores. verdict:
    conclusion from comparing attack and null. Both are None in the summary of a null.
    """

    run: str
    source: str
    attack: str
    spec: str
    knows_defense: bool
    defense: str
    oracles: tuple[str, ...]
    cases: Mapping[str, int]
    examples: int
    success: Estimate | None
    label_success: Estimate | None
    psnr: Distribution | None
    ssim: Distribution | None
    ssim_global: Distribution | None
    lpips: Distribution | None
    lpips_net: str | None
    mse: Distribution | None
    continuous_error: Distribution | None
    categorical_right: Distribution | None
    seconds: float | None
    iterations: float | None
    failures: int
    surplus: int
    routes: Mapping[str, int]
    withheld: tuple[str, ...] = ()
    linked_right: Estimate | None = None
    identified: Estimate | None = None
    exact_match: Estimate | None = None
    other_success: Estimate | None = None
    other_psnr: Distribution | None = None
    other_lpips: Distribution | None = None
    tag_jaccard: Distribution | None = None
    tagger: str | None = None
    bound: float | None = None
    efficiency: float | None = None
    confidence: ConfidenceQuality | None = None
    null: "Summary | None" = None
    verdict: Verdict | None = None

    @property
    def has_failed(self) -> bool:
        """Return whether at least one case failed, and none is done or interrupted."""
        return bool(self.cases.get("failed")) and not self.cases.get("done") and not self.cases.get("interrupted")

    @property
    def routes_text(self) -> str:
        """Return as text how many cases each method reconstructed, the commonest first, such as "5 by linear, 1 by optimisation".

        Methods are the names in `routes`: closed forms, a search (`optimisation`), and guesses that do not use the update (`prior
        alone`). The text is "" if all reconstructions are by `optimisation`, or if there are none.
        """
        if set(self.routes) <= {"optimisation"}:
            return ""
        return ", ".join(f"{count} by {route}" for route, count in sorted(self.routes.items(), key=lambda item: -item[1]))

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the summary as a dict that can be written as JSON."""
        verdict = {"verdict": self.verdict.to_json() if self.verdict else None}
        return {**asdict(self), **verdict, "null": self.null.to_json() if self.null else None}


def summarise(rows: Iterable[ScoreRow]) -> list[Summary]:
    """Return a list of one summary per attack and run.

    A null (the same attack without the update) has no summary of its own in the list: it is the field `null` of its attack's
    summary. Rows of a null without rows of its attack are left out.
    """
    ordered = sorted(rows, key=lambda row: (row.run, row.source))
    groups = [list(group) for _, group in groupby(ordered, key=lambda row: (row.run, row.source))]
    nulls = {_get_attack_key(group[0]): group for group in groups if group[0].null}
    return [_summarise_with_null(group, nulls.get(_get_attack_key(group[0]), [])) for group in groups if not group[0].null]


def _get_attack_key(row: ScoreRow) -> tuple[Any, ...]:
    """Return a key that identifies an attack on a run and is equal in rows of the attack and of its null."""
    return row.run, *make_attack_key(partial(getattr, row))


def _summarise_with_null(rows: Sequence[ScoreRow], null: Sequence[ScoreRow]) -> Summary:
    """Return the summary of an attack, with its verdict and the summary of its null (no rows if it was not run)."""
    cases, done = {row.case for row in rows}, [row for row in rows if row.is_finished]
    same, counted = [row for row in null if row.case in cases], {row.case for row in done}
    other = [row for row in same if row.is_finished and row.case in counted]
    beside = _make_summary(same, other, fill_failures(other)) if same else None
    return replace(_make_summary(rows, done, fill_failures(done, other)), null=beside, verdict=judge_attack(done, other))


def _make_summary(rows: Sequence[ScoreRow], done: Sequence[ScoreRow], complete: Sequence[ScoreRow]) -> Summary:
    """Return the summary of an attack or null with None for the fields `null` and `verdict`.

    rows: all rows of the attack or null. done: the rows of finished cases. complete: the rows `done` after `fill_failures`.
    """
    first = rows[0]
    clusters = find_clusters((row.index, row.case) for row in done)

    def estimate(key: str) -> Distribution | None:
        values = average_by_example(complete, key)
        return mean(list(values.values()), [clusters[index] for index in values]) if values else None

    def estimate_part(key: str) -> Estimate | None:
        values = average_by_example(done, key)
        return estimate_share(list(values.values()), [clusters[index] for index in values]) if values else None

    efforts = {row.case: row for row in done if row.iterations is not None}.values()
    bound, efficiency = _compare_with_bounds(complete)
    return Summary(
        run=first.run,
        source=first.source,
        attack=first.attack,
        spec=first.spec,
        knows_defense=first.knows_defense,
        defense=first.defense,
        oracles=first.oracles,
        withheld=first.withheld,
        cases=count_cases({row.case: row.state for row in rows}),
        examples=len(done),
        success=estimate_part("success"),
        label_success=estimate_part("label_success"),
        psnr=estimate("psnr"),
        ssim=estimate("ssim"),
        ssim_global=estimate("ssim_global"),
        lpips=estimate("lpips"),
        lpips_net=next((row.lpips_net for row in rows if row.lpips_net), None),
        mse=estimate("mse"),
        continuous_error=estimate("continuous_error"),
        categorical_right=estimate("categorical_right"),
        seconds=sum(row.seconds or 0.0 for row in efforts) if efforts else None,
        iterations=median(row.iterations or 0 for row in efforts) if efforts else None,
        failures=sum(row.failure is not None for row in done),
        surplus=sum({row.case: row.surplus or 0 for row in done}.values()),
        linked_right=estimate_part("link_correct"),
        identified=estimate_part("identified"),
        exact_match=estimate_part("exact_match"),
        other_success=estimate_part("other_success"),
        other_psnr=estimate("other_psnr"),
        other_lpips=estimate("other_lpips"),
        tag_jaccard=estimate("tag_jaccard"),
        tagger=next((row.tagger for row in rows if row.tagger), None),
        bound=bound,
        efficiency=efficiency,
        confidence=judge_confidence([(row.confidence, bool(row.success)) for row in done if row.confidence is not None]),
        routes=dict(Counter(row.route for row in efforts if row.route)),
    )


def _compare_with_bounds(rows: Sequence[ScoreRow]) -> tuple[float | None, float | None]:
    """Return the mean lower bound on the mean squared error, and the efficiency: this mean divided by the mean of the errors.

    Means are over the distinct examples that have both a bound and an error. For the efficiency, a mean below the error of
    rounding to 8 bits is raised to that error. The result is (None, None) if there are no such examples.
    """
    bounds, errors = average_by_example(rows, "bound_mse"), average_by_example(rows, "mse")
    both = [index for index in bounds if index in errors]
    if not both:
        return None, None
    bound, error = fmean(bounds[index] for index in both), fmean(errors[index] for index in both)
    minimum = 10 ** (-PSNR_OF_8_BITS / 10)  # smaller errors do not matter
    return bound, max(bound, minimum) / max(error, minimum)
