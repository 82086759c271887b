"""Encoding of table columns for a model: numbers scaled to [0, 1], and one-hot categories.

Ranges and categories are given by the user; those that are not given are computed from the held-out or the training rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from fedsim.data.base import Array
from fedsim.data.csv_rows import MISSING_VALUE, Texts
from fedsim.recording.observation import Column

RangeSource = Literal["held_out", "clients"]
RANGE_SOURCES: tuple[RangeSource, ...] = get_args(RangeSource)


@dataclass(frozen=True)
class KnownColumns:
    """Given ranges and categories of a table's columns, and the rows from which all other ranges and categories are computed.

    file:        the table's file, for messages.
    ranges:      given ranges [low, high], keyed by column name; from public knowledge.
    categories:  given lists of categories, keyed by column name; from public knowledge.
    ranges_from: source of the ranges and categories of all other columns: "held_out" or "clients".
    source_rows: mask (N,) of the rows from which the ranges and categories of these other columns are computed.
    Raises ValueError for another `ranges_from`, for a range that is not [low, high] with finite low <= high, for categories that
    are not a nonempty list of distinct values, and for a column with both.
    """

    file: Path
    ranges: Mapping[str, Any]
    categories: Mapping[str, Any]
    ranges_from: str
    source_rows: Array

    def __post_init__(self) -> None:
        if self.ranges_from not in RANGE_SOURCES:
            raise ValueError(f"{self.file}: argument ranges_from must be {' or '.join(RANGE_SOURCES)}, got {self.ranges_from!r}")
        if both := sorted(set(self.ranges) & set(self.categories)):
            raise ValueError(
                f"{self.file}: the arguments ranges and categories both name column {both[0]!r}; name it in only one of them"
            )
        for name, given in self.ranges.items():
            pair = isinstance(given, Sequence) and len(given) == 2 and all(map(_is_finite, given))
            if not pair or not given[0] <= given[1]:
                raise ValueError(
                    f"{self.file}: the range of column {name!r} must be [low, high], finite and with low <= high, got {given!r}"
                )
        for name, values in self.categories.items():
            several = isinstance(values, Sequence) and not isinstance(values, str)
            if not several or not values or len(set(map(str, values))) < len(values):
                raise ValueError(
                    f"{self.file}: categories of column {name!r} must be a list of distinct values, at least one, got {values!r}"
                )

    def find_source(self, columns: Iterable[str]) -> Literal["public", "held_out", "clients"]:
        """Return the source of the ranges and categories of `columns`.

        If the columns have several sources, the result is the source that reveals most about clients: "clients", then "held_out",
        then "public".
        """
        if all(name in self.ranges or name in self.categories for name in columns):
            return "public"
        return "clients" if self.ranges_from == "clients" else "held_out"

    @property
    def where(self) -> str:
        """The words "held-out rows" or "training rows", from which ranges that were not given are computed, for messages."""
        return "held-out rows" if self.ranges_from == "held_out" else "training rows"


class Feature(NamedTuple):
    """An encoded column of a table: `values` (N, K), K = 1 for numbers, and the description of each of the K model inputs."""

    values: Array
    columns: tuple[Column, ...]


def encode(known: KnownColumns, name: str, texts: Texts, categorical: bool, limit: int) -> Feature:
    """Encode the column `name` with the values `texts` (N,): numbers are scaled to [0, 1], other values are one-hot.

    A missing number becomes the middle of a given range, or else the median of the source rows. Among categories, the missing
    value "?" counts as any other. A value that is not among the categories becomes all zeros.

    categorical: whether to treat numbers as categories. This is also done if `known.categories` has a list for this column.
    limit:       largest number of categories.
    Raises ValueError, with advice, for an infinite number, for a given range if not all values are numbers, for more categories
    than `limit`, and for a numeric column without a given range that has no value in `known.source_rows`.
    """
    file, numbers = known.file, None if categorical or name in known.categories else parse_numbers(texts)
    if numbers is None:
        if name in known.ranges:
            raise ValueError(
                f"{file}: column {name!r} has a range, but not all its values are numbers; give its categories instead"
            )
        categories = list(map(str, known.categories.get(name) or sorted(set(texts[known.source_rows]))))
        if len(categories) > limit:
            raise ValueError(
                f"{file}: column {name!r} has {len(categories)} categories, more than max_categories = {limit}; list it under "
                "drop, or raise max_categories"
            )
        return _encode_categories(name, texts, categories)
    if np.isinf(numbers).any():
        raise ValueError(
            f"{file}: column {name!r} has an infinite value; correct it, or list the column under categorical or drop"
        )
    if name in known.ranges:
        low, high = map(float, known.ranges[name])
        return _encode_numbers(name, numbers, low, high, (low + high) / 2)
    seen = numbers[known.source_rows & ~np.isnan(numbers)]
    if not len(seen):
        raise ValueError(
            f"{file}: column {name!r} is empty in all {known.where}; list it under drop, or give its range under ranges"
        )
    return _encode_numbers(name, numbers, float(seen.min()), float(seen.max()), float(np.median(seen)))


def scale(numbers: Array, low: Array | float, high: Array | float) -> Array:
    """Scale values to float32 in [0, 1]: 0 at `low`, 1 at `high`, clamped outside.

    If `low` equals `high`, the result is 1 at `low + 1` instead.
    """
    width = np.where(np.subtract(high, low) == 0, 1, np.subtract(high, low))
    return np.clip((numbers - low) / width, 0, 1).astype(np.float32)


def parse_numbers(texts: Texts) -> Array | None:
    """Parse texts (N,) as float64, with NaN for missing values ("?"); return None if any other text is not a number.

    A text with an underscore, such as 1_000, is not a number.
    """
    try:
        values = np.array(["nan" if text == MISSING_VALUE else text for text in texts], dtype=np.float64)
    except ValueError:
        return None
    underscored = any("_" in text for text in texts)  # Python reads 1_000 as a number, but in a table it is a code
    return None if underscored else values


def format_few(texts: set[str]) -> str:
    """Return the first five texts in sorted order and in quotes, and how many more there are, as text."""
    shown = ", ".join(map(repr, sorted(texts)[:5]))
    return f"{shown} and {len(texts) - 5} more" if len(texts) > 5 else shown


def _encode_numbers(name: str, numbers: Array, low: float, high: float, missing: float) -> Feature:
    filled = np.where(np.isnan(numbers), missing, numbers)
    return Feature(scale(filled, low, high)[:, None], (Column(name=name, low=low, high=high),))


def _encode_categories(name: str, texts: Texts, categories: list[str]) -> Feature:
    place = {category: i for i, category in enumerate(categories)}
    places = np.array([place.get(text, -1) for text in texts])
    values = (places[:, None] == np.arange(len(categories))).astype(np.float32)
    return Feature(values, tuple(Column(name=name, kind="categorical", category=category) for category in categories))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
