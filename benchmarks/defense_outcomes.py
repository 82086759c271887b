"""What a defense does to an attack: differences paired by example, clustered by case, and judged by a margin.

A difference counts as none only where its whole interval lies within the margin, and as one only where it lies beyond it. What is
neither is undecided, and holds for nothing that was declared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from attacker.scoring.statistics import Estimate, mean

MARGIN_DB = 1.5
"""Differences of the mean PSNR below this are of no consequence."""
FEWEST_CASES = 6
"""Independent cases, below which an interval says nothing, and so the outcome is undecided."""
MOST_DB = 58.9
"""PSNR at which an image is as near to its original as rounding to 8 bits leaves it; no value counts for more."""

Declared = Literal["flat", "falls", "gone", "rises"]
"""What becomes of the PSNR from no defense to the strongest setting.

flat:  it stays: equivalent within the margin. falls, rises: by more than the margin. gone: it falls, and exceeds the best
null by less than the margin.
"""
Outcome = Literal["flat", "falls", "gone", "rises", "undecided"]


@dataclass(frozen=True)
class Scored:
    """One attack on one setting, by example: its case, its PSNR, and that of a null."""

    case: Mapping[str, str]
    psnr: Mapping[str, float]
    null: Mapping[str, float]


@dataclass(frozen=True)
class Change:
    """From no defense to a setting, of so many cases.

    from_none, over_null: mean paired differences in dB, to the same attack on undefended updates and to a null, with 95 %
    intervals over cases.
    """

    from_none: Estimate
    over_null: Estimate
    cases: int

    @property
    def outcome(self) -> Outcome:
        """What the intervals show, see `Declared`."""
        low, high = self.from_none.low, self.from_none.high
        if self.cases < FEWEST_CASES:
            return "undecided"
        if high < -MARGIN_DB:
            return "gone" if self.over_null.high < MARGIN_DB else "falls"
        if low > MARGIN_DB:
            return "rises"
        return "flat" if low > -MARGIN_DB and high < MARGIN_DB else "undecided"

    def holds(self, declared: Declared) -> bool:
        """Whether the outcome is what was declared; what is gone has fallen."""
        return self.outcome == declared or (declared == "falls" and self.outcome == "gone")


def compare(none: Scored, defended: Scored) -> Change:
    """Compare an attack on defended updates with the same attack on undefended ones of the same examples, and with a null.

    Raises ValueError where the two are not of the same examples.
    """
    if none.psnr.keys() != defended.psnr.keys():
        apart = sorted(none.psnr.keys() ^ defended.psnr.keys())
        raise ValueError(f"examples {', '.join(apart[:5])} were attacked with the defense or without it, and not with both")
    return Change(
        difference(defended.psnr, none.psnr, defended.case),
        difference(defended.psnr, defended.null, defended.case),
        len(set(defended.case.values())),
    )


def difference(one: Mapping[str, float], other: Mapping[str, float], case: Mapping[str, str]) -> Estimate:
    """Estimate the mean of one less the other, by example, with an interval over cases, each of which counts once."""
    by_case: dict[str, list[float]] = {}
    for example in one:
        by_case.setdefault(case[example], []).append(min(one[example], MOST_DB) - min(other[example], MOST_DB))
    return mean([fmean(values) for values in by_case.values()])
