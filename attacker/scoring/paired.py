"""Rows of an attack paired with those of its null on the same examples."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log10
from typing import Any

from attacker.scoring.rows import ScoreRow
from attacker.scoring.statistics import clusters_of

PSNR_OF_8_BITS = 10 * log10(12 * 255**2)
"""PSNR of rounding an image to 8 bits, 58.9 dB (uniform error with variance step**2 / 12).

Originals are known to 8 bits, so smaller errors reveal nothing more. Means cap each row at this value; otherwise ten exact rows
of a hundred would raise a mean as much as all others together. Rows keep their own value, up to 120 dB.
"""
SCORES = ("psnr", "ssim", "ssim_global", "lpips", "mse", "continuous_error", "categorical_right")
"""Fields of rows that are filled in for failures."""


def value_of(row: ScoreRow, score: str) -> float | None:
    """Return a row's score as it enters means; None if it has none."""
    value = getattr(row, score)
    if value is None:
        return None
    return min(float(value), PSNR_OF_8_BITS) if score == "psnr" else float(value)


def filled(rows: Iterable[ScoreRow], null: Iterable[ScoreRow] = ()) -> list[ScoreRow]:
    """Return rows in which a failure has the scores of the null's answer to the same example of the same case.

    An attack that gives no answer tells no more than its null does. Where there is none, the scores are those of the best
    constant image, which scoring wrote into the row as `constant`: of all images of one colour the nearest to other examples of
    the data.
    """
    answers = {_place(row): row for row in null}
    found = []
    for row in rows:
        if row.failure is None:
            found.append(row)
            continue
        other, constant = answers.get(_place(row)), row.constant or {}
        missing: dict[str, Any] = {score: getattr(other, score, None) for score in SCORES if getattr(row, score) is None}
        missing |= {score: constant.get(score) for score, value in missing.items() if value is None}
        found.append(replace(row, **missing))
    return found


def _place(row: ScoreRow) -> tuple[str, int]:
    return row.case, row.index


def by_example(rows: Iterable[ScoreRow], score: str) -> dict[int, float]:
    """Return the mean score of each distinct example over its rows, by its index; of those that have one."""
    values: dict[int, list[float]] = {}
    for row in rows:
        if (value := value_of(row, score)) is not None:
            values.setdefault(row.index, []).append(value)
    return {index: sum(own) / len(own) for index, own in values.items()}


@dataclass(frozen=True)
class Paired:
    """Rows of an attack and of its null on the same examples of the same cases, in the same order, with failures filled in."""

    attack: tuple[ScoreRow, ...]
    null: tuple[ScoreRow, ...]

    @property
    def clusters(self) -> dict[Any, int]:
        """The cluster of each example, by its index."""
        return clusters_of((row.index, row.case) for row in self.attack)

    def differences(self, score: str) -> dict[int, float]:
        """Attack less null, by example, where both have the score."""
        values: dict[int, list[float]] = {}
        for one, other in zip(self.attack, self.null, strict=True):
            mine, its = value_of(one, score), value_of(other, score)
            if mine is not None and its is not None:
                values.setdefault(one.index, []).append(mine - its)
        return {index: sum(own) / len(own) for index, own in values.items()}


def pair(rows: Sequence[ScoreRow], null: Sequence[ScoreRow]) -> Paired:
    """Pair the rows of an attack with those of its null by case and example; drop rows without a partner."""
    answers = {_place(row): row for row in filled(null)}
    both = [row for row in filled(rows, null) if _place(row) in answers]
    return Paired(tuple(both), tuple(answers[_place(row)] for row in both))
