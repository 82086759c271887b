"""Summaries of the rows of one attack."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from statistics import median
from typing import Any

from attacker.scoring.paired import by_example, filled
from attacker.scoring.rows import ScoreRow
from attacker.scoring.states import count_cases
from attacker.scoring.statistics import Distribution, Estimate, clusters_of, mean, share
from attacker.scoring.verdict import Verdict, judge


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The scores of one attack on one run, beside those of the same attack without a gradient.

    cases: how many there are, by state, see `states.State`.
    examples: rows of finished cases, one for each example and case. The estimates are of these alone: None where no case is
    finished. They count each distinct example once, by the mean of its rows: the same image attacked in five rounds is no five
    independent images. Intervals are by clusters of examples that cases tie together, see `statistics`.
    psnr to mse, continuous_error and categorical_right: over all of these, where an attack that gave no answer counts as its null
    does, or as the best constant image, see `filled`; None where none has one. A mean counts no PSNR for more than 58.9 dB, see
    `PSNR_OF_8_BITS`.
    linked_right: share of the examples said to be in several rounds that were in all of these; None where none was said to be.
    surplus: candidates beyond the examples that there are, over all cases: none of them was compared with truth.
    lpips_net: the network of LPIPS, where there is one.
    routes: how many cases were answered in which way.
    verdict: on the attack against its null; None of a null itself.
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
    linked_right: Estimate | None = None
    null: "Summary | None" = None
    verdict: Verdict | None = None

    @property
    def ways(self) -> str:
        """Return as text how cases were answered; "" if all were answered by the attack's own search."""
        if set(self.routes) <= {"optimisation"}:
            return ""
        return ", ".join(f"{count} by {route}" for route, count in sorted(self.routes.items(), key=lambda item: -item[1]))

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        verdict = {"verdict": self.verdict.as_json() if self.verdict else None}
        return {**asdict(self), **verdict, "null": self.null.as_json() if self.null else None}


def summarise(rows: Iterable[ScoreRow]) -> list[Summary]:
    """Return one summary for each attack, nulls beside the attacks that they belong to."""
    ordered = sorted(rows, key=lambda row: (row.run, row.source))
    groups = [list(group) for _, group in groupby(ordered, key=lambda row: (row.run, row.source))]
    nulls = {_attack_of(group[0]): group for group in groups if group[0].null}
    return [_beside(group, nulls.get(_attack_of(group[0]), [])) for group in groups if not group[0].null]


def _attack_of(row: ScoreRow) -> tuple[str, str, int, str, str]:
    """What an attack and its null have in common: run, specification, seed and code."""
    return row.run, row.spec.removesuffix(" without gradient"), row.seed, row.network_code, row.attack_code


def _beside(rows: Sequence[ScoreRow], null: Sequence[ScoreRow]) -> Summary:
    """A summary beside that of its null on the same cases, of which count those that both finished, and the verdict."""
    cases, done = {row.case for row in rows}, [row for row in rows if row.is_finished]
    same, counted = [row for row in null if row.case in cases], {row.case for row in done}
    other = [row for row in same if row.is_finished and row.case in counted]
    beside = _summary(same, other, filled(other)) if same else None
    return replace(_summary(rows, done, filled(done, other)), null=beside, verdict=judge(done, other))


def _summary(rows: Sequence[ScoreRow], done: Sequence[ScoreRow], complete: Sequence[ScoreRow]) -> Summary:
    """done: the rows that count. complete: the same, scores of failures filled in."""
    first = rows[0]
    clusters = clusters_of((row.index, row.case) for row in done)

    def estimate(key: str) -> Distribution | None:
        values = by_example(complete, key)
        return mean(list(values.values()), [clusters[index] for index in values]) if values else None

    def part(key: str) -> Estimate | None:
        values = by_example(done, key)
        return share(list(values.values()), [clusters[index] for index in values]) if values else None

    efforts = [row for row in done if row.iterations is not None]
    return Summary(
        run=first.run,
        source=first.source,
        attack=first.attack,
        spec=first.spec,
        knows_defense=first.knows_defense,
        defense=first.defense,
        oracles=first.oracles,
        cases=count_cases(rows),
        examples=len(done),
        success=part("success"),
        label_success=part("label_success"),
        psnr=estimate("psnr"),
        ssim=estimate("ssim"),
        ssim_global=estimate("ssim_global"),
        lpips=estimate("lpips"),
        lpips_net=next((row.lpips_net for row in rows if row.lpips_net), None),
        mse=estimate("mse"),
        continuous_error=estimate("continuous_error"),
        categorical_right=estimate("categorical_right"),
        seconds=sum({row.case: row.seconds or 0.0 for row in efforts}.values()) if efforts else None,
        iterations=median(row.iterations or 0 for row in efforts) if efforts else None,
        failures=sum(row.failure is not None for row in done),
        surplus=sum({row.case: row.surplus or 0 for row in done}.values()),
        linked_right=part("link_correct"),
        routes=dict(Counter({row.case: row.route for row in efforts if row.route}.values())),
    )
