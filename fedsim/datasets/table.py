"""Tables: from columns of text to rows of numbers in [0, 1]."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsim.datasets.base import Array, Dataset, Examples
from fedsim.datasets.rows import MISSING, Texts, read_columns
from fedsim.wire.observation import Column, DataSpec

Table = Mapping[str, Texts]


def csv(
    path: str,
    label: str | None = None,
    split: str | None = None,
    categorical: Sequence[str] = (),
    drop: Sequence[str] = (),
    delimiter: str = ",",
    max_categories: int = 1000,
) -> Dataset:
    """Your own table: comma-separated values with the columns' names in the first row, also gzipped.

    label:       the column to predict; by default the last.
    split:       a column of `train` and `test`; by default the one called `split` where it says just that. Without one,
                 every fifth row is held out.
    categorical: columns to take as categories although all their values are numbers.
    drop:        columns that the model does not see. Partitions still can.
    delimiter:   what stands between values.
    max_categories: a column with more of them is refused.

    A column of numbers is scaled to [0, 1] by the range of its training rows, and held-out values are clamped to it; where a
    number is missing (empty, ?, NA or nan) stands their median. Any other column is one-hot, in sorted order of its training
    values; a missing one is the category `?`, and a held-out one that training never saw is all zeros. Columns that say
    the same twice (education and its number) are all kept unless dropped. For partitions, every column but label and split
    is a group, by its text in the file.
    """
    file = Path(path)
    table = read_columns(file, delimiter)
    drop, categorical = (([names] if isinstance(names, str) else list(names)) for names in (drop, categorical))
    for name in (*drop, *categorical, *(given for given in (label, split) if given is not None)):
        _check_known(file, name, table)
    held_out, split = _held_out(file, table, split)
    label = label if label is not None else [name for name in table if name != split and name not in drop][-1]
    inputs = [name for name in table if name not in (label, split, *drop)]
    if label in (split, *drop) or not inputs:
        raise ValueError(f"{path}: with label {label!r} and without {split!r} and {list(drop)}, no column is left to learn from")
    labels, classes = _labels(file, label, table[label], held_out)
    features = [_encoded(file, name, table[name], held_out, name in categorical, max_categories) for name in inputs]
    examples = Examples(
        values=np.concatenate([feature.values for feature in features], axis=1),
        labels=labels,
        groups={name: column for name, column in table.items() if name not in (label, split)},
    )
    columns = tuple(column for feature in features for column in feature.columns)
    spec = DataSpec(shape=(len(columns),), num_classes=len(classes), columns=columns)
    train, test = examples.subset(~held_out), examples.subset(held_out)
    return Dataset(name=f"csv:{path}", spec=spec, class_names=classes, train=train, test=test)


def _check_known(file: Path, name: str, table: Table) -> None:
    if name not in table:
        close = get_close_matches(name, table, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{file}: there is no column {name!r}.{hint} It has: {', '.join(table)}")


def _held_out(file: Path, table: Table, split: str | None) -> tuple[Array, str | None]:
    """(mask of the rows held out, the column that says so)."""
    if split is None and "split" in table and set(table["split"]) == {"train", "test"}:
        split = "split"
    if split is None:
        rows = len(next(iter(table.values())))
        if rows < 5:
            raise ValueError(f"{file}: every fifth row is held out, and there are only {rows}; name a split column")
        return np.arange(rows) % 5 == 4, None
    if (values := set(table[split])) != {"train", "test"}:
        raise ValueError(f"{file}: split column {split!r} must say train or test in each row, both somewhere, got {_few(values)}")
    return np.asarray(table[split] == "test", dtype=bool), split


def _labels(file: Path, name: str, texts: Texts, held_out: Array) -> tuple[Array, tuple[str, ...]]:
    """(class of each row, names of the classes in order)."""
    if MISSING in texts:
        row = 1 + texts.tolist().index(MISSING)
        raise ValueError(f"{file}: row {row} has no label in column {name!r}; delete the row, or name another label")
    found = set(texts[~held_out])
    numbers = _numbers(np.array(list(found), dtype=object))
    classes = sorted(found) if numbers is None else sorted(found, key=float)
    if len(classes) < 2:
        raise ValueError(f"{file}: label {name!r} must take two values at least in the training rows, got {_few(found)}")
    if unknown := set(texts[held_out]) - found:
        raise ValueError(f"{file}: label {name!r} is {_few(unknown)} in held-out rows, and never in training rows")
    number = {text: i for i, text in enumerate(classes)}
    return np.array([number[text] for text in texts], dtype=np.int64), tuple(classes)


class _Feature(NamedTuple):
    """A column as the model sees it: `values` (N, K), and what each of the K is."""

    values: Array
    columns: tuple[Column, ...]


def _encoded(file: Path, name: str, texts: Texts, held_out: Array, categorical: bool, limit: int) -> _Feature:
    known = texts[~held_out] != MISSING
    numbers = None if categorical else _numbers(texts)
    if numbers is None:
        categories = sorted(set(texts[~held_out]))
        if len(categories) > limit:
            raise ValueError(f"{file}: column {name!r} has {len(categories)} categories; drop it, or raise max_categories")
        return _one_hot(name, texts, categories)
    if not known.any():
        raise ValueError(f"{file}: column {name!r} has no value in the training rows; drop it")
    if np.isinf(numbers).any():
        raise ValueError(f"{file}: column {name!r} has an infinite value; mend it, or list it under categorical or drop")
    return _scaled(name, numbers, numbers[~held_out][known])


def _numbers(texts: Texts) -> Array | None:
    """(N,) float64, NaN for what is missing; None where any text is no number."""
    try:
        values = np.array(["nan" if text == MISSING else text for text in texts], dtype=np.float64)
    except ValueError:
        return None
    underscored = any("_" in text for text in texts)  # 1_000 is a number to Python, and a code to everyone else
    return None if underscored else values


def _scaled(name: str, numbers: Array, seen: Array) -> _Feature:
    """seen: the training values. A constant column becomes 0."""
    low, high = float(seen.min()), float(seen.max())
    filled = np.where(np.isnan(numbers), np.median(seen), numbers)
    scaled = np.clip((filled - low) / ((high - low) or 1), 0, 1)
    return _Feature(scaled.astype(np.float32)[:, None], (Column(name=name, low=low, high=high),))


def _one_hot(name: str, texts: Texts, categories: list[str]) -> _Feature:
    place = {category: i for i, category in enumerate(categories)}
    places = np.array([place.get(text, -1) for text in texts])
    values = (places[:, None] == np.arange(len(categories))).astype(np.float32)
    return _Feature(values, tuple(Column(name=name, kind="categorical", category=category) for category in categories))


def _few(texts: set[str]) -> str:
    shown = ", ".join(map(repr, sorted(texts)[:5]))
    return f"{shown} and {len(texts) - 5} more" if len(texts) > 5 else shown
