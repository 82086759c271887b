"""Reads the index of a recording that may come from anywhere: SQLite runs nothing out of it, and every value is checked."""

import os
import re
import sqlite3
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from functools import cache
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

from fedsim.recording.codec import CODECS
from fedsim.recording.masked_vectors import MASKED, SUM
from fedsim.recording.safe_files import UNPRINTABLE, DamagedFile, opened, parse_json, read_exactly, shorten
from fedsim.recording.writer import SCHEMA, is_plain

INDEX = "index.sqlite"
MAX_BYTES = 16 * 2**30
MAX_VALUE = 8 * 2**20
"""Bytes of the longest value: the names of half a million clients."""
MAX_NUMBER = 2**53
"""Larger than any count, and exact as a float too."""
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 20,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
}
STEP = 100_000
"""Instructions of SQLite's machine between two looks at how many there were."""
MAGIC = bytes.fromhex("d9d505f920a163d7")
"""First in a journal, and last in one that names another journal."""
CHUNK = 1 << 20
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the index: a client's reply in a round, or that there was none.

    num_examples: behind the update. reported: what the client said, where a reader of the recording derived the other from it.
    """

    round: int
    client: str
    node: str
    attempt: int
    status: str
    reason: str
    num_examples: int | None
    file: str | None
    sha256: str | None
    codec: str | None
    bytes: int
    metrics: Mapping[str, float]
    received_at: float
    reported: int | None = None

    @property
    def key(self) -> str:
        return f"{self.round:05d}-{self.client}"


COLUMNS = tuple(field.name for field in fields(Row) if field.name != "reported")


@dataclass(frozen=True, kw_only=True)
class SentRow:
    """One round of the index: whom the server sent what, and the file that holds it."""

    round: int
    attempt: int
    file: str
    sha256: str
    cohort: tuple[str, ...]


def ask(folder: Path, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """What the index in `folder` answers. Raises DamagedFile, naming it, where it is not one that a recorder made."""
    path = folder / INDEX
    try:
        try:
            size = _check_header(folder)
            return _ask(path, size, query, values)
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorname", "") != "SQLITE_READONLY_ROLLBACK":
                raise
            with _recovered(folder) as copy:
                return _ask(copy, size, query, values)
    except (sqlite3.Error, UnicodeDecodeError, MemoryError) as error:  # an error may quote what is no text
        raise DamagedFile(path, UNPRINTABLE.sub("?", str(error)[:200])) from None


def row_of(folder: Path, values: tuple[Any, ...]) -> Row:
    """One line of the index, from its values in the order of `COLUMNS`. Raises DamagedFile where one of them is none."""
    if wrong := _wrong(*values):
        raise _bad(folder, values, wrong, values[COLUMNS.index(wrong)])
    row = dict(zip(COLUMNS, values, strict=True))
    row["metrics"] = _metrics(folder, values, row["metrics"])
    return Row(**row)


def sent_of(folder: Path, values: tuple[Any, ...]) -> SentRow:
    """One round of the index, from round, attempt, file, sha256 and cohort. Raises DamagedFile where one of them is none."""
    round, attempt, file, sha256, text = values
    checks = {
        "round": _is_count(round, 1),
        "attempt": _is_count(attempt, 1),
        "file": _is_count(round, 1) and file == path_of(round, "global"),
        "sha256": isinstance(sha256, str) and DIGEST.fullmatch(sha256) is not None,
    }
    for (column, good), value in zip(checks.items(), values, strict=False):
        if not good:
            raise _bad(folder, values, column, value)
    try:
        cohort = parse_json(text) if isinstance(text, str) else None
    except ValueError:
        cohort = None
    if not isinstance(cohort, list) or not all(isinstance(name, str) and is_plain(name) for name in cohort):
        raise _bad(folder, values, "cohort", text)
    return SentRow(round=round, attempt=attempt, file=file, sha256=sha256, cohort=tuple(cohort))


def path_of(round: int, name: str) -> str:
    """Where a recorder writes the reply of client `name` in a round, and under "global" what the server sent."""
    return f"rounds/{round:05d}/{name}.safetensors"


def check_counts(folder: Path, rows: Iterable[tuple[Any, ...]]) -> None:
    """Raises DamagedFile where one of `rows` is anything but numbers that count something, the first of them a round."""
    for values in rows:
        if not (_is_count(values[0], 1) and all(_is_count(value, 0) for value in values)):
            raise _bad(folder, values, "round or bytes", values)


def check_clients(folder: Path, clients: Iterable[Any]) -> None:
    """Raises DamagedFile where one of `clients` is no name of a client."""
    for client in clients:
        if not (isinstance(client, str) and is_plain(client)):
            raise DamagedFile(folder / INDEX, f"{shorten(client)} is no name of a client")


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= MAX_NUMBER


def _wrong(
    round: Any, client: Any, node: Any, attempt: Any, status: Any, reason: Any, examples: Any,
    file: Any, sha256: Any, codec: Any, bytes: Any, metrics: Any, received_at: Any,
) -> str:  # fmt: skip
    """The first column with a value that no recorder writes, or nothing. Asked for each row of large recordings."""
    if type(round) is not int or not 1 <= round <= MAX_NUMBER:
        return "round"
    if type(client) is not str or not (is_plain(client) or client == SUM):
        return "client"
    if type(node) is not str or len(node) > 64 or not node.isprintable():
        return "node"
    if type(attempt) is not int or not 1 <= attempt <= MAX_NUMBER:
        return "attempt"
    if status not in ("complete", "masked", "failed", "late") or (client == SUM and status != "complete"):
        return "status"
    if type(reason) is not str:
        return "reason"
    if examples is not None and (type(examples) is not int or not 0 <= examples <= MAX_NUMBER):
        return "num_examples"
    if file is None:
        if sha256 is not None or codec is not None:
            return "file"
    else:
        if file != f"rounds/{round:05d}/{client}.safetensors":
            return "file"
        if type(sha256) is not str or not DIGEST.fullmatch(sha256):
            return "sha256"
        if type(codec) is not str or (codec not in CODECS if status == "complete" else codec not in (*CODECS, MASKED)):
            return "codec"
    if type(bytes) is not int or not 0 <= bytes <= MAX_NUMBER:
        return "bytes"
    if type(metrics) is not str:
        return "metrics"
    if type(received_at) is not float or not isfinite(received_at):
        return "received_at"
    return ""


def _metrics(folder: Path, values: tuple[Any, ...], text: str) -> dict[str, float]:
    """Unlike elsewhere NaN is a number here: it is what clients report when their training goes wrong."""
    if text == "{}":
        return {}
    try:
        metrics = parse_json(text, finite=False)
    except ValueError:
        metrics = None
    if type(metrics) is not dict:
        raise _bad(folder, values, "metrics", text)
    if any(type(value) is not float and type(value) is not int for value in metrics.values()):
        raise _bad(folder, values, "metrics", text)
    return metrics


def _bad(folder: Path, values: tuple[Any, ...], column: str, value: Any) -> DamagedFile:
    where = ", ".join(shorten(value) for value in values[:2])
    return DamagedFile(folder / INDEX, f"row {where}: {shorten(value)} is not to be in {column}")


def _check_header(folder: Path) -> int:
    """Size of the index. Raises DamagedFile where it is no database, or one that would be changed by being read."""
    with opened(folder, INDEX, limit=MAX_BYTES) as file:
        start = file.read(100)
        if not start.startswith(b"SQLite format 3\0") or len(start) < 100:
            raise ValueError("file is not a database")
        size = file.seek(0, 2)
    if start[18:20] != b"\1\1" or os.path.lexists(folder / f"{INDEX}-wal") or os.path.lexists(folder / f"{INDEX}-shm"):
        raise DamagedFile(folder / INDEX, "keeps its changes in a way that no recorder uses")
    journal = folder / f"{INDEX}-journal"
    if os.path.lexists(journal) and not stat.S_ISREG(journal.lstat().st_mode):
        raise DamagedFile(journal, "is no regular file")
    return size


def _ask(path: Path, size: int, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    steps = count()
    most = 100 + 2 * size // STEP
    with closing(sqlite3.connect(path.absolute().as_uri() + "?mode=ro", uri=True)) as index:
        for limit, value in LIMITS.items():
            index.setlimit(limit, value)
        index.set_progress_handler(lambda: next(steps) > most, STEP)
        index.execute("PRAGMA trusted_schema = OFF")
        index.execute("PRAGMA cell_size_check = ON")
        found = index.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchmany(10)
        if set(found) != _schema():
            raise sqlite3.DatabaseError("holds other tables than a recorder makes")
        return index.execute(query, values).fetchall()


@cache
def _schema() -> set[tuple[str, ...]]:
    with closing(sqlite3.connect(":memory:")) as index:
        index.executescript(SCHEMA)
        return set(index.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))


@contextmanager
def _recovered(folder: Path) -> Iterator[Path]:
    """A copy of an index whose writer was killed amid a commit: SQLite undoes that, which a reader must not do in place."""
    with tempfile.TemporaryDirectory() as private:
        copy, journal = Path(private) / INDEX, f"{INDEX}-journal"
        size = _copy(folder, INDEX, copy)
        size += _copy(folder, journal, Path(private) / journal)
        _check_journal(Path(private) / journal, size, folder / journal)
        with closing(sqlite3.connect(copy)) as index:
            index.execute("PRAGMA synchronous = OFF")
            index.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield copy


def _copy(folder: Path, name: str, to: Path) -> int:
    with opened(folder, name, limit=MAX_BYTES) as file, to.open("xb") as copy:
        while part := file.read(CHUNK):
            copy.write(part)
        return copy.tell()


def _check_journal(copy: Path, size: int, path: Path) -> None:
    """Raises DamagedFile where undoing would do more than put pages back.

    A journal may end with the name of another file, which SQLite deletes when it is done; and it says how large the
    database was, which makes it as large again.
    """
    with copy.open("rb", buffering=0) as file:
        start = memoryview(bytearray(28))
        try:
            read_exactly(file, start)
        except ValueError:
            return
        file.seek(-8, 2)
        if file.read(8) == MAGIC:
            raise DamagedFile(path, "names another journal, which no recorder does")
    pages, page = (int.from_bytes(start[at : at + 4], "big") for at in (16, 24))
    if pages * (page or 65536) > size:
        raise DamagedFile(path, f"says that the index had {pages} pages, more than there can have been")
