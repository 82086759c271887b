"""What the rows of one attack come to."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median
from typing import Any

from attacker.scoring.states import count_cases, finished
from attacker.scoring.statistics import Estimate, mean, rate

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The scores of one attack on one run, beside those of the same attack without a gradient.

    cases: how many there are, by state, see `states.State`.
    examples: rows of finished cases, one for each example and case. The estimates are of these alone: None where no case is
    finished. They count each distinct example once, by the mean of its rows: the same image attacked in five rounds is no five
    independent images.
    psnr to mse, continuous_error and categorical_right: over the examples that have one; None where none has.
    linked_right: share of the examples said to be in several rounds that were in all of these; None where none was said to be.
    surplus: candidates beyond the examples that there are, over all cases: none of them was compared with truth.
    lpips_net: the network of LPIPS, where there is one.
    routes: how many cases were answered in which way.
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
    psnr: Estimate | None
    ssim: Estimate | None
    ssim_global: Estimate | None
    lpips: Estimate | None
    lpips_net: str | None
    mse: Estimate | None
    continuous_error: Estimate | None
    categorical_right: Estimate | None
    seconds: float | None
    iterations: float | None
    failures: int
    surplus: int
    routes: Mapping[str, int]
    linked_right: Estimate | None = None
    null: "Summary | None" = None

    @property
    def gone(self) -> bool | None:
        """Whether no more is recovered than without any gradient: neither the rate nor its upper limit is above the null's.

        None where there is no null on the same examples: fewer of them would widen its interval and flatter the defense.
        """
        if self.null is None or self.null.examples != self.examples or self.success is None or self.null.success is None:
            return None
        return self.success.value <= self.null.success.value and self.success.high <= self.null.success.high

    @property
    def ways(self) -> str:
        """How cases were answered, in words; "" where all were by the attack's own optimisation."""
        if set(self.routes) <= {"optimisation"}:
            return ""
        return ", ".join(f"{count} by {route}" for route, count in sorted(self.routes.items(), key=lambda item: -item[1]))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "gone": self.gone}


def summarise(rows: Iterable[Row]) -> list[Summary]:
    """One summary for each attack, nulls beside the attacks that they belong to."""
    ordered = sorted(rows, key=lambda row: (row["run"], row["source"]))
    groups = [list(group) for _, group in groupby(ordered, key=lambda row: (row["run"], row["source"]))]
    nulls = {(group[0]["run"], _plain(group[0]), group[0]["seed"]): group for group in groups if group[0]["null"]}
    return [
        _beside(group, nulls.get((group[0]["run"], _plain(group[0]), group[0]["seed"]), []))
        for group in groups
        if not group[0]["null"]
    ]


def _beside(rows: Sequence[Row], null: Sequence[Row]) -> Summary:
    """A summary beside that of its null on the same cases; of the null's count those that the attack finished, too."""
    cases, done = {row["case"] for row in rows}, finished(rows)
    same, counted = [row for row in null if row["case"] in cases], {row["case"] for row in done}
    beside = _summary(same, [row for row in finished(same) if row["case"] in counted]) if same else None
    return _summary(rows, done, beside)


def _plain(row: Row) -> str:
    return str(row["spec"]).removesuffix(" without gradient")


def _summary(rows: Sequence[Row], done: Sequence[Row], null: Summary | None = None) -> Summary:
    """done: the rows that count."""
    first = rows[0]

    def means(key: str) -> list[float]:
        by_example: dict[int, list[float]] = {}
        for row in done:
            if row.get(key) is not None:
                by_example.setdefault(row["index"], []).append(row[key])
        return [sum(values) / len(values) for values in by_example.values()]

    def estimate(key: str) -> Estimate | None:
        return mean(values) if (values := means(key)) else None

    def share(key: str) -> Estimate | None:
        return rate(sum(values), len(values)) if (values := means(key)) else None

    efforts = [row for row in done if row.get("iterations") is not None]
    return Summary(
        **{key: first[key] for key in ("run", "source", "attack", "spec", "knows_defense", "defense")},
        oracles=tuple(first["oracles"]),
        cases=count_cases(rows),
        examples=len(done),
        success=share("success"),
        label_success=share("label_success"),
        psnr=estimate("psnr"),
        ssim=estimate("ssim"),
        ssim_global=estimate("ssim_global"),
        lpips=estimate("lpips"),
        lpips_net=next((row["lpips_net"] for row in rows if row.get("lpips_net")), None),
        mse=estimate("mse"),
        continuous_error=estimate("continuous_error"),
        categorical_right=estimate("categorical_right"),
        seconds=sum({row["case"]: row["seconds"] for row in efforts}.values()) if efforts else None,
        iterations=median(row["iterations"] for row in efforts) if efforts else None,
        failures=sum(row["failure"] is not None for row in done),
        surplus=sum({row["case"]: row.get("surplus") or 0 for row in done}.values()),
        linked_right=share("link_correct"),
        routes=dict(Counter({row["case"]: row["route"] for row in efforts if row.get("route")}.values())),
        null=null,
    )
