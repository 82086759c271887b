"""The effect of a defense on an attack: mean differences of PSNR with confidence intervals, compared with a margin.

A difference counts as zero only if its whole confidence interval lies within the margin, and as a fall or rise only if the whole
interval lies beyond the margin. Otherwise it is undecided.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from attacker.scoring.statistics import Estimate, mean

MARGIN_DB = 1.5
"""Largest difference of the mean PSNR, in dB, that counts as irrelevant."""
MIN_CASES = 6
"""Smallest number of independent cases with which an outcome is stated; with fewer it is undecided."""
MAX_DB = 58.9
"""PSNR in dB of an image that differs from its original only by rounding to 8 bits; larger values are capped."""

Declared = Literal["flat", "falls", "gone", "rises"]
"""The declared change of the PSNR from no defense to the strongest setting.

flat: it changes by less than the margin. falls, rises: it changes by more than the margin. gone: it falls by more than the
margin, and the remaining PSNR exceeds that of the best null by less than the margin.
"""
DefenseOutcome = Literal["flat", "falls", "gone", "rises", "undecided"]


@dataclass(frozen=True)
class ExampleScores:
    """The scores of one attack on one setting of a defense.

    case, psnr, null: dicts from the name of an example to its case (the update that it is behind), to its PSNR by the attack, and
    to its PSNR by the null.
    """

    case: Mapping[str, str]
    psnr: Mapping[str, float]
    null: Mapping[str, float]


@dataclass(frozen=True)
class Change:
    """The change of an attack's PSNR from no defense to a setting of a defense.

    from_none: mean PSNR on defended updates minus mean PSNR on undefended updates, in dB, with its 95 % interval. over_null: mean
    PSNR on defended updates minus mean PSNR of a null, in dB, with its 95 % interval. cases: number of independent cases.
    """

    from_none: Estimate
    over_null: Estimate
    cases: int

    @property
    def outcome(self) -> DefenseOutcome:
        """The outcome that the intervals show: "flat", "falls", "gone" or "rises" as in `Declared`, else "undecided".

        With fewer than `MIN_CASES` cases it is "undecided".
        """
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

        A measured "gone" (the PSNR falls to the PSNR of the null) also agrees with a declared "falls".
        """
        return self.outcome == declared or (declared == "falls" and self.outcome == "gone")


def compare(none: ExampleScores, defended: ExampleScores) -> Change:
    """Compare an attack on defended updates with the same attack on undefended ones, and with a null.

    none, defended: scores of the attack without and with the defense. Raises ValueError if their examples differ.
    """
    if none.psnr.keys() != defended.psnr.keys():
        apart = sorted(none.psnr.keys() ^ defended.psnr.keys())
        raise ValueError(
            f"examples {', '.join(apart[:5])} were attacked only with the defense or only without it; attack the same ones "
            "in both runs"
        )
    return Change(
        estimate_difference(defended.psnr, none.psnr, defended.case),
        estimate_difference(defended.psnr, defended.null, defended.case),
        len(set(defended.case.values())),
    )


def estimate_difference(one: Mapping[str, float], other: Mapping[str, float], case: Mapping[str, str]) -> Estimate:
    """Estimate the mean PSNR difference `one` - `other` over cases of equal weight, with its confidence interval.

    The difference of a case is the mean over its examples, with each PSNR capped at `MAX_DB`. one, other, case: dicts from an
    example to its PSNR, and to its case.
    """
    by_case: dict[str, list[float]] = {}
    for example in one:
        by_case.setdefault(case[example], []).append(min(one[example], MAX_DB) - min(other[example], MAX_DB))
    return mean([fmean(values) for values in by_case.values()])
