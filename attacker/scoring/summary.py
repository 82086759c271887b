"""What the rows of one attack come to."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median
from typing import Any

from attacker.scoring.statistics import Estimate, mean, rate

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The scores of one attack on one run, beside those of the same attack without a gradient.

    psnr, ssim, mse: over the examples that have one; None where none has.
    """

    run: str
    source: str
    attack: str
    spec: str
    knows_defense: bool
    defense: str
    oracles: tuple[str, ...]
    examples: int
    success: Estimate
    label_success: Estimate
    psnr: Estimate | None
    ssim: Estimate | None
    mse: Estimate | None
    seconds: float | None
    iterations: float | None
    failures: int
    null: "Summary | None" = None

    @property
    def gone(self) -> bool | None:
        """Whether no more is recovered than without any gradient: neither the rate nor its upper limit is above the null's."""
        if self.null is None:
            return None
        return self.success.value <= self.null.success.value and self.success.high <= self.null.success.high

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "gone": self.gone}


def summarise(rows: Iterable[Row]) -> list[Summary]:
    """One summary for each attack, nulls beside the attacks that they belong to."""
    ordered = sorted(rows, key=lambda row: (row["run"], row["source"]))
    groups = [list(group) for _, group in groupby(ordered, key=lambda row: (row["run"], row["source"]))]
    nulls = {(group[0]["run"], _plain(group[0]), group[0]["seed"]): _summary(group) for group in groups if group[0]["null"]}
    return [
        _summary(group, nulls.get((group[0]["run"], _plain(group[0]), group[0]["seed"])))
        for group in groups
        if not group[0]["null"]
    ]


def _plain(row: Row) -> str:
    return str(row["spec"]).removesuffix(" without gradient")


def _summary(rows: Sequence[Row], null: Summary | None = None) -> Summary:
    first = rows[0]

    def estimate(key: str) -> Estimate | None:
        values = [row[key] for row in rows if row[key] is not None]
        return mean(values) if values else None

    efforts = [row for row in rows if row.get("iterations") is not None]
    return Summary(
        **{key: first[key] for key in ("run", "source", "attack", "spec", "knows_defense", "defense")},
        oracles=tuple(first["oracles"]),
        examples=len(rows),
        success=rate(sum(row["success"] for row in rows), len(rows)),
        label_success=rate(sum(row["label_success"] for row in rows), len(rows)),
        psnr=estimate("psnr"),
        ssim=estimate("ssim"),
        mse=estimate("mse"),
        seconds=sum({row["case"]: row["seconds"] for row in efforts}.values()) if efforts else None,
        iterations=median(row["iterations"] for row in efforts) if efforts else None,
        failures=sum(row["failure"] is not None for row in rows),
        null=null,
    )
