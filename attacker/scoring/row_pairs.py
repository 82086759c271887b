"""Score rows of an attack, paired with the rows of its null (the attack without the update) on the same examples.

A case is the observations that are attacked together: one round of a client, or several.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log10
from typing import Any

from attacker.scoring.rows import ScoreRow
from attacker.scoring.statistics import find_clusters

PSNR_OF_8_BITS = 10 * log10(12 * 255**2)
"""PSNR of rounding an image to 8 bits, 58.9 dB (uniform error with variance step**2 / 12).

Originals are known to 8 bits, so smaller errors reveal nothing more. Means cap each row at this value; otherwise ten exact rows
of a hundred would raise a mean as much as all others together. Rows keep their own value, up to 120 dB.
"""
FILLED_SCORES = ("psnr", "ssim", "ssim_global", "lpips", "mse", "continuous_error", "categorical_right")
"""Fields of score rows that `fill_failures` fills in for failures."""


def _get_score(row: ScoreRow, score: str) -> float | None:
    """Return the field `score` as a number for means: PSNR at most `PSNR_OF_8_BITS`, booleans as 1 and 0; None if missing."""
    value = getattr(row, score)
    if value is None:
        return None
    return min(float(value), PSNR_OF_8_BITS) if score == "psnr" else float(value)


def fill_failures(rows: Iterable[ScoreRow], null: Iterable[ScoreRow] = ()) -> list[ScoreRow]:
    """Return all rows in order; rows without a reconstruction get the null's scores on the same example and case.

    The reason is that an attack without a reconstruction reveals no more than its null does. Only fields in `FILLED_SCORES` that
    are None are filled in. If `null` has no score either, the row's field `constant` gives it: the score of the image of one
    colour with the smallest mean squared error over a sample of the data set, or of the mean table row. Rows of cases that were
    not attacked yet are unchanged.
    """
    answers = {_get_key(row): row for row in null}
    filled = []
    for row in rows:
        if row.failure is None:
            filled.append(row)
            continue
        other, constant = answers.get(_get_key(row)), row.constant or {}
        missing: dict[str, Any] = {score: getattr(other, score, None) for score in FILLED_SCORES if getattr(row, score) is None}
        missing |= {score: constant.get(score) for score, value in missing.items() if value is None}
        filled.append(replace(row, **missing))
    return filled


def _get_key(row: ScoreRow) -> tuple[str, int]:
    return row.case, row.index


def average_by_example(rows: Iterable[ScoreRow], score: str) -> dict[int, float]:
    """Return the mean of the field `score` of each distinct example that has it, by its index in the data set."""
    values: dict[int, list[float]] = {}
    for row in rows:
        if (value := _get_score(row, score)) is not None:
            values.setdefault(row.index, []).append(value)
    return {index: sum(scores) / len(scores) for index, scores in values.items()}


@dataclass(frozen=True)
class RowPairs:
    """Rows of an attack and of its null on the same examples of the same cases, in the same order.

    Rows without a reconstruction hold the scores that `fill_failures` gives them.
    """

    attack: tuple[ScoreRow, ...]
    null: tuple[ScoreRow, ...]

    @property
    def clusters(self) -> dict[Any, int]:
        """Return a dict from the data set index of each example to the number of its cluster.

        Examples are in one cluster if they are connected by common cases, since these tend to succeed or fail together.
        """
        return find_clusters((row.index, row.case) for row in self.attack)

    def compute_differences(self, score: str) -> dict[int, float]:
        """Return a dict from an example's index in the data set to its mean score in the attack minus that in the null.

        Rows are ignored if the attack or the null has no value of the score. score: name of a field.
        """
        values: dict[int, list[float]] = {}
        for row, other in zip(self.attack, self.null, strict=True):
            attack_score, null_score = _get_score(row, score), _get_score(other, score)
            if attack_score is not None and null_score is not None:
                values.setdefault(row.index, []).append(attack_score - null_score)
        return {index: sum(scores) / len(scores) for index, scores in values.items()}

    def compute_differences_from(self, score: str, control: str) -> dict[int, float]:
        """Return each example's mean `score` minus its mean `control`, by index; without examples that lack one."""
        scores, controls = (average_by_example(self.attack, name) for name in (score, control))
        return {index: value - controls[index] for index, value in scores.items() if index in controls}


def pair_rows(rows: Sequence[ScoreRow], null: Sequence[ScoreRow]) -> RowPairs:
    """Pair the rows of an attack with the rows of its null by case and example; drop rows without a partner.

    Rows without a reconstruction get the scores of `fill_failures`.
    """
    answers = {_get_key(row): row for row in fill_failures(null)}
    both = [row for row in fill_failures(rows, null) if _get_key(row) in answers]
    return RowPairs(tuple(both), tuple(answers[_get_key(row)] for row in both))
