"""Reader of CSV files as columns of text, without interpreting values."""

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from csv import Error as BrokenCsv
from csv import reader
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

Texts = NDArray[np.object_]

MISSING_VALUE = "?"
"""Text that replaces a missing value."""
MISSING_MARKERS = frozenset({"", "?", "na", "nan"})
"""Texts that mark a missing value in a file, in lower case; case is ignored."""


def read_columns(path: Path, delimiter: str) -> Mapping[str, Texts]:
    """Read the columns of a file into a dict, keyed by the names in the first row.

    Each column is an array (N,) of texts without spaces around them. A missing value, see `MISSING_MARKERS`, becomes "?".
    Empty rows are skipped. A file whose name ends in .gz is decompressed.
    Raises FileNotFoundError if there is no file, and ValueError, naming the file, if it is not a table. If a row has a wrong
    number of values, the message also gives the row's number. Row 1 is the first one below the column names; empty rows are not
    counted.
    """
    if not path.exists():
        raise FileNotFoundError(f"data set file {path} does not exist")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise ValueError(f"{path} is {kind}, not a regular file; give the path of a regular file")
    if len(delimiter) != 1:
        raise ValueError(f"{path}: delimiter must be one character, got {delimiter!r}")
    with _explain_errors(path):
        rows = _read_rows(path, delimiter)
        names = [name.strip() for name in next(rows, [])]
        _check_names(path, names)
        columns: list[list[str]] = [[] for _ in names]
        seen: dict[str, str] = {}  # equal texts share one object to save memory
        for number, row in enumerate(rows, start=1):
            if len(row) != len(names):
                raise ValueError(f"{path}: row {number} below the column names has {len(row)} values for {len(names)} columns")
            for column, value in zip(columns, row, strict=True):
                column.append(seen.setdefault(value, _clean(value)))
    if not columns[0]:
        raise ValueError(f"{path}: there are no rows below the column names")
    return {name: np.array(column, dtype=object) for name, column in zip(names, columns, strict=True)}


def _read_rows(path: Path, delimiter: str) -> Iterator[list[str]]:
    opened: Callable[..., TextIO] = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", newline="", encoding="utf-8-sig") as file:
        yield from (row for row in reader(file, delimiter=delimiter, skipinitialspace=True) if row)


def _clean(value: str) -> str:
    text = value.strip()
    return MISSING_VALUE if text.lower() in MISSING_MARKERS else text


def _check_names(path: Path, names: list[str]) -> None:
    if len(names) < 2:
        raise ValueError(f"{path}: a table needs a label and at least one more column, got {names}; is the delimiter right?")
    if unnamed := [i for i, name in enumerate(names, start=1) if not name]:
        raise ValueError(f"{path}: the first row has no name for column {unnamed[0]}, counted from 1; add a name there")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path}: two columns are called {twice[0]!r}")


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (BrokenCsv, UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        form = "UTF-8 text compressed by gzip" if path.suffix == ".gz" else "UTF-8 text"
        raise ValueError(f"{path} is not a valid CSV file: {error}; save the table again as {form}") from None
