"""The effect of a defense on an attack: differences paired by example, clustered by case, and compared with a margin.

A difference counts as zero only if its whole confidence interval lies within the margin, and as nonzero only if the interval lies
outside of it. Otherwise it is undecided, and confirms no declaration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from attacker.scoring.statistics import Estimate, mean

MARGIN_DB = 1.5
"""Largest difference of the mean PSNR, in dB, that counts as irrelevant."""
MIN_CASES = 6
"""Smallest number of independent cases for which an interval is computed; with fewer the outcome is undecided."""
MAX_DB = 58.9
"""PSNR in dB of an image that differs from its original only by rounding to 8 bits; larger values are capped."""

Declared = Literal["flat", "falls", "gone", "rises"]
"""The declared change of the PSNR from no defense to the strongest setting.

flat: it changes by less than the margin. falls, rises: it changes by more than the margin. gone: it falls by more than the
margin, and the remaining PSNR exceeds that of the best null by less than the margin.
"""
DefenseOutcome = Literal["flat", "falls", "gone", "rises", "undecided"]


@dataclass(frozen=True)
class Scored:
    """The scores of one attack on one setting: dicts from an example to its case, its PSNR, and that of a null."""

    case: Mapping[str, str]
    psnr: Mapping[str, float]
    null: Mapping[str, float]


@dataclass(frozen=True)
class Change:
    """The change of the PSNR from no defense to a setting, over a number of cases.

    from_none: mean paired difference, in dB, of the attack on defended and on undefended updates, with its 95 % interval over
    cases. over_null: the same of the attack on defended updates and a null (the best guess without the update).
    """

    from_none: Estimate
    over_null: Estimate
    cases: int

    @property
    def outcome(self) -> DefenseOutcome:
        """The outcome that the intervals show: "flat", "falls", "gone" or "rises" as in `Declared`, else "undecided"."""
        low, high = self.from_none.low, self.from_none.high
        if self.cases < MIN_CASES:
            return "undecided"
        if high < -MARGIN_DB:
            return "gone" if self.over_null.high < MARGIN_DB else "falls"
        if low > MARGIN_DB:
            return "rises"
        return "flat" if low > -MARGIN_DB and high < MARGIN_DB else "undecided"

    def is_as_declared(self, declared: Declared) -> bool:
        """Return whether the measured outcome is the declared one.

        A measured "gone" (the PSNR falls to that of the null) also agrees with a declared "falls".
        """
        return self.outcome == declared or (declared == "falls" and self.outcome == "gone")


def compare(none: Scored, defended: Scored) -> Change:
    """Compare an attack on defended updates with the same attack on undefended ones of the same examples, and with a null.

    Raises ValueError if both are not of the same examples.
    """
    if none.psnr.keys() != defended.psnr.keys():
        apart = sorted(none.psnr.keys() ^ defended.psnr.keys())
        raise ValueError(f"examples {', '.join(apart[:5])} were attacked only with the defense or only without it; attack both")
    return Change(
        estimate_difference(defended.psnr, none.psnr, defended.case),
        estimate_difference(defended.psnr, defended.null, defended.case),
        len(set(defended.case.values())),
    )


def estimate_difference(one: Mapping[str, float], other: Mapping[str, float], case: Mapping[str, str]) -> Estimate:
    """Estimate the mean difference `one` - `other` over examples, with a confidence interval over cases of equal weight."""
    by_case: dict[str, list[float]] = {}
    for example in one:
        by_case.setdefault(case[example], []).append(min(one[example], MAX_DB) - min(other[example], MAX_DB))
    return mean([fmean(values) for values in by_case.values()])
