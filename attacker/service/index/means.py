"""Means over the finished cases of an attack, in which each distinct example counts once, as in the report."""

from collections.abc import Iterable, Sequence

from attacker.scoring.row_pairs import PSNR_OF_8_BITS
from attacker.service.index.json_lines import ShownScore


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def average_success(scores: Sequence[ShownScore]) -> float | None:
    """Return the share of distinct examples of finished cases that were recovered, each by its mean; None without any."""
    return _average_by_example((row.example, float(row.success)) for row in scores if row.is_finished)


def average_labels(scores: Sequence[ShownScore]) -> float | None:
    """Return the share of distinct examples of finished cases with a recovered label, each by its mean, or None."""
    return _average_by_example((row.example, float(row.label_success)) for row in scores if row.is_finished)


def average_psnr(scores: Sequence[ShownScore]) -> float | None:
    """Return the mean PSNR in dB over distinct examples of finished cases; None if no PSNR is known.

    Each single PSNR is limited to `PSNR_OF_8_BITS`. An example that was attacked several times then counts with its mean. An
    example without a reconstruction counts with `ShownScore.counted_psnr`.
    """
    known = ((row.example, row.counted_psnr) for row in scores if row.is_finished and row.counted_psnr is not None)
    return _average_by_example((example, min(value, PSNR_OF_8_BITS)) for example, value in known)


def count_finished(scores: Sequence[ShownScore]) -> int:
    """Return the number of distinct examples in finished cases, over which `average_success` is a share."""
    return len({row.example for row in scores if row.is_finished})


def _average_by_example(values: Iterable[tuple[int, float]]) -> float | None:
    values_by_example: dict[int, list[float]] = {}
    for index, value in values:
        values_by_example.setdefault(index, []).append(value)
    return mean(sum(values) / len(values) for values in values_by_example.values())
