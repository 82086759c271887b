"""Readers of a recording's manifest and index. Given their earlier result, they read only rows of rounds that have changed."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.recording import DamagedFile, Recording, Row
from fedsim.recording.index import check_counts, query_index
from fedsim.recording.manifest import MAX_BYTES
from fedsim.recording.safe_files import read_bytes

MAX_MESSAGES = 20
"""Largest number of damaged rows that are reported one by one."""
MAX_MESSAGE = 300
"""Largest length of a message about damage, in characters."""


RoundMarks = Mapping[int, tuple[Any, ...]]
"""Dict from round to values that change with its rows: number, total bytes, attempt, number of complete rows, and last arrival.

The last arrival is the Unix time when the server received the last reply of the round.
"""


@dataclass(frozen=True, kw_only=True)
class Index:
    """The state of a recording's index, without its rows.

    rounds: dict from round to values that change whenever its rows do, see `RoundMarks`. clients: names of all clients, sorted;
    the name under which sums of secure aggregation are recorded is left out. damage: dict from round to messages about rows that
    cannot be read; under 0, messages about the whole index.
    """

    rounds: RoundMarks = field(default_factory=dict)
    clients: tuple[str, ...] = ()
    damage: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def observations(self) -> int:
        return sum(marks[0] for marks in self.rounds.values())

    @property
    def attempts(self) -> dict[int, int]:
        """Dict from each round to the number of times that the federation had been started when the round was recorded.

        It is 1 for rounds before any resume. A resume may repeat a round.
        """
        return {number: marks[2] for number, marks in self.rounds.items()}

    @property
    def updated(self) -> float | None:
        times = [marks[-1] for marks in self.rounds.values() if isinstance(marks[-1], float) and isfinite(marks[-1])]
        return max(times) if times else None

    @property
    def trouble(self) -> tuple[str, ...]:
        messages = [message for _, found in sorted(self.damage.items()) for message in found]
        more = len(messages) - MAX_MESSAGES
        return (*messages[:MAX_MESSAGES], *([f"and {more} more of the kind"] if more > 0 else []))


def hash_manifest(folder: Path) -> str:
    """Return a digest of the manifest, which distinguishes the recording in `folder` from a later one in the same place.

    A resumed run keeps its manifest. Raises ValueError, naming the file, if it cannot be read.
    """
    return hashlib.sha256(read_bytes(folder / "recording", "manifest.json", limit=MAX_BYTES)).hexdigest()[:32]


def read_index(folder: Path, previous: Index | None) -> Index:
    """Read the state of the index of the run in `folder`. Damage is reported in `Index.damage`, not raised.

    previous: the state at an earlier time; only rows of rounds that changed since then are checked for damage. None checks all.
    """
    previous = previous or Index()
    try:
        recording = Recording(folder / "recording")
        rounds = _read_rounds(recording.folder)
        clients = tuple(recording.list_clients())
    except (ValueError, OSError) as error:
        return Index(damage={0: (format_error(error, folder),)})
    changed = {number for number, marks in rounds.items() if previous.rounds.get(number) != marks} | {0}
    damage = {number: messages for number, messages in previous.damage.items() if number in rounds and number not in changed}
    problems_by_round: dict[int, list[str]] = {}
    _read_rows(recording, changed - {0} if previous.rounds else None, problems_by_round, folder)
    return Index(
        rounds=rounds,
        clients=clients,
        damage={**damage, **{number: tuple(problems) for number, problems in problems_by_round.items()}},
    )


def read_rows(folder: Path, rounds: RoundMarks, previous: "IndexedRows | None" = None) -> "IndexedRows":
    """Return the rows of the index; rows that cannot be read are left out.

    rounds: `Index.rounds` as returned by `read_index`. previous: rows at an earlier time; rounds that have not changed since then
    are taken from it. Raises ValueError if the recording cannot be opened.
    """
    previous = previous or IndexedRows({}, {})
    changed = [number for number, marks in rounds.items() if previous.rounds.get(number) != marks]
    kept = {number: rows for number, rows in previous.by_round.items() if number in rounds and number not in set(changed)}
    if changed:
        recording = Recording(folder / "recording")
        for row in _read_rows(recording, changed if kept else None, {}, folder):
            kept.setdefault(row.round, ())
            kept[row.round] += (row,)
    return IndexedRows(dict(rounds), dict(sorted(kept.items())))


class IndexedRows(NamedTuple):
    """The rows of an index, with the marks of its rounds.

    rounds: marks, see `RoundMarks`, by which a later read finds the rounds that have changed. by_round: dict from round to its
    rows.
    """

    rounds: RoundMarks
    by_round: Mapping[int, tuple[Row, ...]]


def _read_rounds(folder: Path) -> dict[int, tuple[Any, ...]]:
    query = "SELECT round, count(*), sum(bytes), max(attempt), sum(status = 'complete'), max(received_at) FROM observations"
    rows = query_index(folder, f"{query} GROUP BY round ORDER BY round")
    check_counts(folder, [values[:5] for values in rows])
    return {values[0]: values[1:] for values in rows}


def _read_rows(
    recording: Recording, rounds: Sequence[int] | set[int] | None, damage: dict[int, list[str]], folder: Path
) -> list[Row]:
    """Return the rows of `rounds`, or of all rounds for None, without those that cannot be read.

    Messages about rows that cannot be read are added to `damage`, a dict from round, at most `MAX_MESSAGES` per round; 0 stands
    for an unknown round. folder: folder of the run, whose path is left out of messages.
    """
    if rounds is not None and not rounds:
        return []
    reported: Counter[int] = Counter()

    def note(error: DamagedFile) -> None:
        number = _parse_round(error.reason)
        reported[number] += 1
        if reported[number] <= MAX_MESSAGES:
            damage.setdefault(number, []).append(format_error(error, folder))

    try:
        rows = recording.read_rows(rounds=rounds, on_damage=note)
    except (ValueError, OSError) as error:  # for example, no space to copy a truncated index
        damage.setdefault(0, []).append(format_error(error, folder))
        return []
    return [replace(row, reason=row.reason[:MAX_MESSAGE], metrics={}) for row in rows]  # all rows stay in memory


def _parse_round(reason: str) -> int:
    """Return the round of a damaged row from a message that begins with "row ROUND, CLIENT"; 0 for any other message."""
    number = reason.removeprefix("row ").partition(",")[0]
    return int(number) if number.isdecimal() and len(number) < 16 else 0


def format_error(error: Exception, folder: Path) -> str:
    """Return the message of an error without the path of the run in `folder`, cut after `MAX_MESSAGE` characters.

    Paths would disclose the folders of this machine to the users of the page.
    """
    message = str(error).replace(f"{folder}/", "").replace(str(folder), folder.name)
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
