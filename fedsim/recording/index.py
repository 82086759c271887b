"""Reader of a recording's index, an SQLite database with a table of rounds and a table of the clients' replies.

The recording may come from an untrusted source, so that values are checked.
"""

import re
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from functools import cache
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

from fedsim.recording.codec import CODECS
from fedsim.recording.index_database import INDEX_FILE, SCHEMA, Image, open_image
from fedsim.recording.masked_vectors import MASKED_CODEC, SUM_CLIENT
from fedsim.recording.safe_files import UNPRINTABLE_PATTERN, DamagedFile, is_count, parse_json, shorten
from fedsim.recording.writer import is_plain

PROGRESS_INSTRUCTIONS = 100_000
"""Number of SQLite instructions between two checks of the limit of a query."""
DIGEST_PATTERN = re.compile("[0-9a-f]{64}")
COPY_ADVICE = "copy the recording again"
"""Advice in errors of a damaged index."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the index: a client's reply in a round, the reason for its absence, or the round's secure sum.

    client:       name of the client; "sum" for the secure sum, which is the mean update that secure aggregation reveals.
    node:         id of the client in Flower, as text; "" for the secure sum.
    attempt:      1, and one more after each time that the run was resumed.
    status:       "complete" if an update came, "masked" if it is only contained in the secure sum, "failed" if the client sent an
                  error or a malformed message, "late" if it did not answer in time.
    reason:       why the client failed or was late, even if only after its masked update came (status "masked"); else "".
    num_examples: number of distinct examples behind the update; None if unknown. In a row from `make_row` it is still the number
                  that the client reported; `Recording.read_rows` replaces it.
    file:         path of the file with what the client sent, relative to the recording's folder. `file`, `sha256` and `codec`
                  are None if nothing that the client sent is stored.
    bytes:        size of the reply on the wire.
    metrics:      numbers that the client reported, by name.
    received_at:  time at which the reply was recorded, in seconds since 1970.
    reported:     number of examples that the client reported. It is None in a row from `make_row`, and in the row of a secure
                  sum.
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


INDEX_COLUMNS = tuple(field.name for field in fields(Row) if field.name != "reported")


@dataclass(frozen=True, kw_only=True)
class SentRow:
    """One round in the index: the file with the weights that the server sent, and the clients that it sent them to (`cohort`).

    attempt: 1, and one more after each time that the run was resumed. file: path relative to the recording's folder.
    """

    round: int
    attempt: int
    file: str
    sha256: str
    cohort: tuple[str, ...]


def query_index(folder: Path, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """Return the rows, as tuples, that an SQL query finds in the index of the recording in `folder`.

    values: values of the placeholders (?) in the query.
    Raises DamagedFile, naming the index, if the index is missing or invalid, or the query takes too long.
    """
    try:
        with open_image(folder) as image:
            return _query_image(image, query, values)
    except (sqlite3.Error, UnicodeDecodeError, MemoryError) as error:  # the error may quote bytes that are no valid text
        reason = UNPRINTABLE_PATTERN.sub("?", str(error)[:200])
        raise DamagedFile(folder / INDEX_FILE, f"{reason}; {COPY_ADVICE}") from None


def make_row(folder: Path, values: tuple[Any, ...]) -> Row:
    """Build a `Row` from its values in the order of `INDEX_COLUMNS`. Raises DamagedFile if a value is invalid.

    folder: the recording, for messages.
    """
    if wrong := _find_invalid_column(*values):
        raise _make_error(folder, values, wrong, values[INDEX_COLUMNS.index(wrong)])
    row = dict(zip(INDEX_COLUMNS, values, strict=True))
    row["metrics"] = _parse_metrics(folder, values, row["metrics"])
    return Row(**row)


def make_sent_row(folder: Path, values: tuple[Any, ...]) -> SentRow:
    """Build a `SentRow` from `values`: round, attempt, file, sha256, and cohort as a JSON list of names, in this order.

    folder: the recording, for messages. Raises DamagedFile if a value is invalid.
    """
    round, attempt, file, sha256, text = values
    checks = {
        "round": is_count(round, 1),
        "attempt": is_count(attempt, 1),
        "file": is_count(round, 1) and file == make_path(round, "global"),
        "sha256": isinstance(sha256, str) and DIGEST_PATTERN.fullmatch(sha256) is not None,
    }
    for (column, good), value in zip(checks.items(), values, strict=False):
        if not good:
            raise _make_error(folder, values, column, value)
    try:
        cohort = parse_json(text) if isinstance(text, str) else None
    except ValueError:
        cohort = None
    if not isinstance(cohort, list) or not all(isinstance(name, str) and is_plain(name) for name in cohort):
        raise _make_error(folder, values, "cohort", text)
    return SentRow(round=round, attempt=attempt, file=file, sha256=sha256, cohort=tuple(cohort))


def make_path(round: int, name: str) -> str:
    """Return the path, relative to the recording's folder, of the file with a client's reply in a round.

    name: the client's name, "sum" for the secure sum, or "global" for the file with the weights that the server sent.
    """
    return f"rounds/{round:05d}/{name}.safetensors"


def check_counts(folder: Path, rows: Iterable[tuple[Any, ...]]) -> None:
    """Raise DamagedFile unless each row consists of the number of a round, from 1, and counts, from 0, all at most `MAX_NUMBER`.

    folder: the recording, for messages.
    """
    for values in rows:
        if not (is_count(values[0], 1) and all(is_count(value) for value in values)):
            raise _make_error(folder, values, "round or bytes", values)


def check_clients(folder: Path, clients: Iterable[Any]) -> None:
    """Raise DamagedFile unless all names have 1 to 64 of the characters A-Z a-z 0-9 - _, and none is "global" or "sum".

    folder: the recording, for messages.
    """
    for client in clients:
        if not (isinstance(client, str) and is_plain(client)):
            raise DamagedFile(
                folder / INDEX_FILE,
                f"{shorten(client)} is not a valid name of a client, because a name has 1 to 64 of the characters A-Z a-z 0-9 - "
                "_ and is not 'global' or 'sum'; copy the recording again",
            )


def _find_invalid_column(
    round: Any, client: Any, node: Any, attempt: Any, status: Any, reason: Any, examples: Any,
    file: Any, sha256: Any, codec: Any, bytes: Any, metrics: Any, received_at: Any,
) -> str:  # fmt: skip
    """Return the name of the first column with an invalid value; "" if all values are valid."""
    if not is_count(round, 1):
        return "round"
    if type(client) is not str or not (is_plain(client) or client == SUM_CLIENT):
        return "client"
    if type(node) is not str or len(node) > 64 or not node.isprintable():
        return "node"
    if not is_count(attempt, 1):
        return "attempt"
    if status not in ("complete", "masked", "failed", "late") or (client == SUM_CLIENT and status != "complete"):
        return "status"
    if type(reason) is not str:
        return "reason"
    if examples is not None and not is_count(examples):
        return "num_examples"
    if file is None:
        if sha256 is not None or codec is not None:
            return "file"
    else:
        if file != make_path(round, client):
            return "file"
        if type(sha256) is not str or not DIGEST_PATTERN.fullmatch(sha256):
            return "sha256"
        if type(codec) is not str or (codec not in CODECS if status == "complete" else codec not in (*CODECS, MASKED_CODEC)):
            return "codec"
    if not is_count(bytes):
        return "bytes"
    if type(metrics) is not str:
        return "metrics"
    if type(received_at) is not float or not isfinite(received_at):
        return "received_at"
    return ""


def _parse_metrics(folder: Path, values: tuple[Any, ...], text: str) -> dict[str, float]:
    """Return the metrics that a client reported, from JSON.

    NaN and infinity are allowed, since clients report them when their training diverges.

    values: the whole row, for error messages. Raises DamagedFile if the text does not map names to numbers.
    """
    if text == "{}":
        return {}
    try:
        metrics = parse_json(text, finite=False)
    except ValueError:
        metrics = None
    if type(metrics) is not dict or not all(type(value) in (float, int) for value in metrics.values()):
        raise _make_error(folder, values, "metrics", text)
    return metrics


def _make_error(folder: Path, values: tuple[Any, ...], column: str, value: Any) -> DamagedFile:
    """Return the error for an invalid value of a column, naming the row by its first two values."""
    where = ", ".join(shorten(value) for value in values[:2])
    return DamagedFile(folder / INDEX_FILE, f"row {where}: {shorten(value)} is not a valid value of {column}")


def _query_image(image: Image, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    steps = count()
    maximum = 100 + 2 * image.size // PROGRESS_INSTRUCTIONS
    image.connection.set_progress_handler(lambda: next(steps) > maximum, PROGRESS_INSTRUCTIONS)
    schema = image.connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchmany(10)
    if set(schema) != _read_schema():
        raise sqlite3.DatabaseError("its tables are not exactly those of a recording's index")
    return image.connection.execute(query, values).fetchall()


@cache
def _read_schema() -> set[tuple[str, ...]]:
    with closing(sqlite3.connect(":memory:")) as index:
        index.executescript(SCHEMA)
        return set(index.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))
