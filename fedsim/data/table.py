"""Loader of data sets from CSV files, whose columns become numbers in [0, 1]."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from fedsim.data.base import Array, Dataset, Examples
from fedsim.data.csv_rows import MISSING_VALUE, Texts, read_columns
from fedsim.data.encoding import KnownColumns, encode, format_few, parse_numbers
from fedsim.recording.observation import DataSpec

Table = Mapping[str, Texts]


def csv(
    path: str,
    label: str | None = None,
    split: str | None = None,
    categorical: Sequence[str] = (),
    drop: Sequence[str] = (),
    delimiter: str = ",",
    max_categories: int = 1000,
    ranges: Mapping[str, Sequence[float]] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    ranges_from: str = "held_out",
) -> Dataset:
    """Load your own table from a CSV file, also gzipped (.gz), with column names in the first row.

    label:          the column to predict; by default the last one that is not `split` or dropped.
    split:          a column with the values `train` and `test`; by default the column named `split` if these are its values.
                    Without such a column, every fifth row is held out.
    categorical:    columns to treat as categories although all their values are numbers.
    drop:           columns that the model does not see. Partitions can still use them.
    delimiter:      character between values.
    max_categories: largest number of categories of a column; ValueError is raised for more.
    ranges:         dict from numeric column to its [low, high] known to the public, such as { age = [0, 120] }.
    categories:     dict from column to its list of categories known to the public; such a column is treated as categories.
    ranges_from:    rows that determine the ranges and categories of the other columns. `held_out`: the held-out rows, which no
                    client has. `clients`: the training rows, so that the clients' exact extremes and rare values become public.

    A column is numeric if all its values are numbers. It is scaled to [0, 1] by its range, and values outside are clamped. A
    missing number (empty, ?, NA or nan) becomes the median of the rows of `ranges_from`, or the middle of a range in `ranges`.
    Any other column is one-hot, with its categories in sorted order, or in the order given in `categories`. A missing value in a
    one-hot column counts as the value `?`, and a value that is no category is all zeros.
    The partition `by_group` can use every column but label and split.
    Public, and in the manifest of a recording, are: names, kinds, ranges and categories of the input columns, the source of the
    ranges and categories, and the number of classes.
    """
    file = Path(path)
    table = read_columns(file, delimiter)
    ranges, categories = ranges or {}, categories or {}
    drop, categorical = (([names] if isinstance(names, str) else list(names)) for names in (drop, categorical))
    for name in (*drop, *categorical, *ranges, *categories, *(given for given in (label, split) if given is not None)):
        _check_known(file, name, table)
    held_out, split = _find_held_out(file, table, split)
    if label is None:
        label = next((name for name in reversed(list(table)) if name != split and name not in drop), "")
    inputs = [name for name in table if name not in (label, split, *drop)]
    if label in ("", split, *drop) or not inputs:
        raise ValueError(
            f"{path}: label {label!r}, split {split!r} and drop {list(drop)} must name different columns and leave at least one "
            "input column; change them"
        )
    labels, classes = _read_labels(file, label, table[label], held_out)
    known = KnownColumns(file, ranges, categories, ranges_from, source_rows=held_out if ranges_from == "held_out" else ~held_out)
    features = [encode(known, name, table[name], name in categorical, max_categories) for name in inputs]
    examples = Examples(
        values=np.concatenate([feature.values for feature in features], axis=1),
        labels=labels,
        groups={name: column for name, column in table.items() if name not in (label, split)},
    )
    columns = tuple(column for feature in features for column in feature.columns)
    source = known.find_source(inputs)
    spec = DataSpec(shape=(len(columns),), num_classes=len(classes), columns=columns, ranges_from=source)
    train, test = examples.select(~held_out), examples.select(held_out)
    return Dataset(name=f"csv:{path}", spec=spec, class_names=classes, train=train, test=test)


def _check_known(file: Path, name: str, table: Table) -> None:
    """Raise ValueError if the table has no column `name`; the message suggests a similar name if there is one."""
    if name not in table:
        close = get_close_matches(name, table, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{file}: there is no column {name!r}.{hint} It has: {', '.join(table)}")


def _find_held_out(file: Path, table: Table, split: str | None) -> tuple[Array, str | None]:
    """Return a mask (N,) of the held-out rows, and the name of the split column, None if there is none.

    split: column with the values train and test; None for the column named split if these are its values, else every fifth row.
    Raises ValueError if the split column has other values, or if there are fewer than five rows and no split column.
    """
    if split is None and "split" in table and set(table["split"]) == {"train", "test"}:
        split = "split"
    if split is None:
        rows = len(next(iter(table.values())))
        if rows < 5:
            raise ValueError(f"{file}: every fifth row is held out, but there are only {rows}; name a split column")
        return np.arange(rows) % 5 == 4, None
    if (values := set(table[split])) != {"train", "test"}:
        raise ValueError(f"{file}: split column {split!r} must hold train and test, and nothing else, got {format_few(values)}")
    return np.asarray(table[split] == "test", dtype=bool), split


def _read_labels(file: Path, name: str, texts: Texts, held_out: Array) -> tuple[Array, tuple[str, ...]]:
    """Return the class number of each row (N,), and the names of the classes in the order of their numbers.

    texts: (N,), the column of labels. held_out: (N,), whether a row is held out. Raises ValueError if a label is missing, if a
    class occurs in held-out rows only, or if training rows have fewer than two classes.
    """
    if MISSING_VALUE in texts:
        row = 1 + texts.tolist().index(MISSING_VALUE)
        raise ValueError(
            f"{file}: row {row} below the column names has no label in column {name!r}; delete this row, or name another "
            "label column"
        )
    found = set(texts[~held_out])
    numbers = parse_numbers(np.array(list(found), dtype=object))
    classes = sorted(found) if numbers is None else sorted(found, key=float)
    if len(classes) < 2:
        raise ValueError(f"{file}: label {name!r} must take at least two values in the training rows, got {format_few(found)}")
    if unknown := set(texts[held_out]) - found:
        raise ValueError(
            f"{file}: label column {name!r} holds {format_few(unknown)} in held-out rows, but never in training rows; move such "
            "rows to training, or delete them"
        )
    number = {text: i for i, text in enumerate(classes)}
    return np.array([number[text] for text in texts], dtype=np.int64), tuple(classes)
