"""Reader of recordings, also from untrusted sources: content is checked, and observations are loaded one at a time."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from defenses.gradients import GradientSpec
from defenses.inputs import InputsSpec
from fedsim.recording import index
from fedsim.recording.codec import Codec, Payload, find_codec
from fedsim.recording.index import Row, SentRow
from fedsim.recording.index_database import INDEX_FILE
from fedsim.recording.manifest import MAX_BYTES, Manifest
from fedsim.recording.masked_vectors import MASKED_CODEC, SUM_CLIENT, MaskedMessage, check_fit
from fedsim.recording.observation import Observation, convert_to_float32
from fedsim.recording.packing.parts import check_kind, check_shape, name_parameter
from fedsim.recording.safe_files import DamagedFile, read_bytes, shorten
from fedsim.recording.selection import Rounds
from fedsim.recording.tensor_files import TensorEntries, read_tensors
from fedsim.recording.writer import BUFFER_PREFIX

OnDamage = Callable[[DamagedFile], None]
MAX_QUERIED_ROUNDS = 10_000
"""Largest number of selected rounds that a query lists one by one."""
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class ReplyCounts:
    """Numbers of clients in the index of one round by status, and the bytes of their replies on the wire.

    complete: an update came; or 1 for the secure sum, if there is one. masked: clients whose update is only contained in the
    secure sum. failed: the client sent an error or a malformed message. late: it did not answer in time.
    """

    round: int
    complete: int
    failed: int
    late: int
    bytes: int
    masked: int = 0


@dataclass(frozen=True)
class SentModel:
    """The weights and buffers that the server sent in one round, and the clients that it sent them to."""

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    cohort: tuple[str, ...]


def find_recording(folder: Path) -> Path:
    """Return the folder of the recording, given it or the run that holds it; a recording is a folder with a manifest.json.

    Raises ValueError if `folder` is neither.
    """
    for at in (folder, folder / "recording"):
        if os.path.lexists(at / "manifest.json"):
            return at
    lack = "it has no manifest.json and no recording/manifest.json" if folder.exists() else "the folder does not exist"
    raise ValueError(f"{folder} is neither a run nor a recording: {lack}")


def find_run(folder: Path) -> Path:
    """Return the run's folder, into which results are written, given it or its recording. Raises ValueError if it is neither."""
    at = find_recording(folder)
    return folder if at != folder else folder.parent if folder.name else folder.resolve().parent


class Recording:
    """A recording on disk: its manifest, its index, and its observations, loaded one at a time.

    It may come from an untrusted source. Invalid content raises DamagedFile, which names the file, when it is read; an invalid
    manifest raises ValueError as soon as the recording is opened.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder / "manifest.json")
        self._sent = lru_cache(maxsize=2)(self._try_read_sent)

    def compute_fingerprint(self) -> str:
        """Return a SHA-256 digest (hexadecimal) of the manifest and of the checksum, in the index, of the first round's weights.

        It identifies the recording, and stays the same when rounds are added after the first.
        """
        first = "".join(row.sha256 for row in self._read_sent_rows("ORDER BY round LIMIT 1"))
        content = read_bytes(self.folder, "manifest.json", limit=MAX_BYTES)
        return hashlib.sha256(content + first.encode()).hexdigest()

    def read_rows(
        self, *, rounds: Iterable[int] | None = None, clients: Iterable[str] | None = None, on_damage: OnDamage | None = None
    ) -> list[Row]:
        """Return the rows of the index in the order of round and client.

        Their `reported` is the number of examples that the client reported, and `num_examples` what `Training.count_examples`
        derives from it; the row of a secure sum is not changed.
        rounds, clients: return only rows of these rounds and of clients with these names; None or empty for all.
        on_damage: function that is called with the error of each invalid row, which is then skipped; None raises the first error.
                   An index that is missing, no database or out of order raises DamagedFile in any case.
        """
        chosen, values = [], []
        for column, wanted in (("round", self._limit_rounds(rounds) if rounds else None), ("client", clients)):
            if wanted is not None and (wanted or column == "round"):
                chosen.append(f"{column} IN (SELECT value FROM json_each(?))")
                values.append(json.dumps(sorted(wanted)))
        where = f" WHERE {' AND '.join(chosen)}" if chosen else ""
        columns = ", ".join(index.INDEX_COLUMNS)
        lines = index.query_index(self.folder, f"SELECT {columns} FROM observations{where} ORDER BY round, client", *values)
        rows: list[Row] = []
        for row in _read_undamaged(lines, lambda line: index.make_row(self.folder, line), on_damage):
            if rows and (row.round, row.client) <= (rows[-1].round, rows[-1].client):
                raise DamagedFile(
                    self.folder / INDEX_FILE,
                    f"the row of round {row.round}, client {row.client!r} is out of order or occurs twice; copy the recording "
                    "again",
                )
            rows.append(self._replace_count(row))
        return rows

    def _replace_count(self, row: Row) -> Row:
        """Return the row with the reported count in `reported`, and `num_examples` by `Training`. Secure sums stay."""
        if row.client == SUM_CLIENT:
            return row
        return replace(row, num_examples=self.manifest.training.count_examples(row.num_examples), reported=row.num_examples)

    def _limit_rounds(self, rounds: Iterable[int]) -> Iterable[int]:
        """Return the rounds to list in a query: all that are given or, of over `MAX_QUERIED_ROUNDS`, only those in the index."""
        wanted = Rounds.of(rounds)
        if len(wanted) <= MAX_QUERIED_ROUNDS:
            return wanted
        return [number for number in self.list_observed_rounds() if number in wanted]

    def count_replies(self) -> list[ReplyCounts]:
        """Return the numbers of replies by status: one `ReplyCounts` per round with rows in the index, in ascending order."""
        statuses = ", ".join(f"sum(status = '{status}')" for status in ("complete", "masked", "failed", "late"))
        counts = index.query_index(
            self.folder, f"SELECT round, {statuses}, sum(bytes) FROM observations GROUP BY round ORDER BY round"
        )
        index.check_counts(self.folder, counts)
        return [
            ReplyCounts(round=round, complete=c, masked=m, failed=f, late=late, bytes=size)
            for round, c, m, f, late, size in counts
        ]

    def list_clients(self) -> list[str]:
        """Return the sorted names of all clients with a row in the index, of any status, also of those that only failed.

        The name of the secure sum, "sum", is left out.
        """
        clients = [
            client for (client,) in index.query_index(self.folder, "SELECT DISTINCT client FROM observations ORDER BY client")
        ]
        clients = [client for client in clients if client != SUM_CLIENT]
        index.check_clients(self.folder, clients)
        return clients

    def list_summed(self, round: int) -> tuple[str, ...]:
        """Return the clients whose updates are in the secure sum of a round, sorted; empty without secure aggregation."""
        query = "SELECT client FROM observations WHERE round = ? AND status = ? ORDER BY client"
        clients = [client for (client,) in index.query_index(self.folder, query, round, MASKED_CODEC)]
        index.check_clients(self.folder, clients)
        return tuple(clients)

    def read_masked(self, row: Row) -> MaskedMessage:
        """Return what the server saw of one client under secure aggregation.

        Raises DamagedFile, naming the file, if the file is invalid, and ValueError if nothing of that kind is stored for the row.
        """
        if row.file is None or row.sha256 is None or row.codec != MASKED_CODEC:
            status = f"{row.status}: {row.reason}" if row.reason else row.status
            raise ValueError(
                f"round {row.round}, client {row.client}: no masked vector is recorded for this row (status {status}); choose a "
                f"row with a file and the codec {MASKED_CODEC!r}"
            )
        weights = self.read_sent(row.round).weights
        tensors = read_tensors(self.folder, row.file, row.sha256, lambda stored: check_fit(stored, weights))
        try:
            return MaskedMessage.from_tensors(tensors)
        except ValueError as error:
            raise DamagedFile(self.folder / row.file, str(error)) from None

    def list_rounds(self) -> list[int]:
        """Return the rounds in which the server sent weights, as the index lists them, ascending."""
        return [row.round for row in self._read_sent_rows("ORDER BY round")]

    def list_observed_rounds(self, clients: Iterable[str] = ()) -> list[int]:
        """Return the rounds that have a row of a client or secure sum in the index, of any status, ascending.

        The rows are not checked, except that a round that is not an integer is left out.
        clients: consider only rows of these names; all by default.
        """
        names = sorted(clients)
        where = " WHERE client IN (SELECT value FROM json_each(?))" if names else ""
        values = [json.dumps(names)] if names else []
        lines = index.query_index(self.folder, f"SELECT DISTINCT round FROM observations{where} ORDER BY round", *values)
        return [number for (number,) in lines if type(number) is int]

    def read_observation(self, row: Row) -> Observation:
        """Return the observation of a row.

        Raises DamagedFile, naming the file, if it is missing or invalid, its checksum differs from the one in the index, or its
        tensors do not fit the weights that the server sent. Raises ValueError if the row has no update to read, because the
        client failed or was late, or its update is masked.
        """
        if row.file is None or row.sha256 is None or row.codec is None:
            message = f"round {row.round}, client {row.client}: nothing was received ({row.status}: {row.reason})"
            raise DamagedFile(self.folder / INDEX_FILE, message) if row.status == "complete" else ValueError(message)
        if row.codec == MASKED_CODEC:
            raise ValueError(
                f"round {row.round}, client {row.client}: its update is masked; attack the secure sum, client {SUM_CLIENT!r}, "
                f"with --client {SUM_CLIENT}"
            )
        m, sent, codec = self.manifest, self.read_sent(row.round), find_codec(row.codec)
        tensors, buffers = _split_buffers(
            read_tensors(self.folder, row.file, row.sha256, lambda stored: _check_fit(stored, sent, codec))
        )
        weights = convert_to_float32(sent.weights)  # some strategies send float64, which clients round to float32 before training
        if row.codec == "weights":
            tensors = {name: t.float() if t.dtype is torch.float64 else t for name, t in tensors.items()}
        observation = Observation(
            round=row.round,
            client=row.client,
            cohort=self.list_summed(row.round) if row.client == SUM_CLIENT else sent.cohort,
            num_examples=row.num_examples,
            model=m.model,
            data=m.data,
            training=m.training.fix_round(row.round),
            defenses=m.defense,
            gradient=GradientSpec.parse(m.gradient),
            inputs=InputsSpec.parse(m.inputs),
            weights=weights,
            payload=Payload(tensors=tensors, codec=row.codec),
            buffers=convert_to_float32(sent.buffers),
            buffers_after=buffers,
            metrics=row.metrics,
        )
        if codec.packs:
            try:
                _ = observation.update
            except ValueError as error:
                raise DamagedFile(self.folder / row.file, str(error)) from None
        return observation

    def read_observations(
        self, *, rounds: Iterable[int] | None = None, clients: Iterable[str] | None = None, on_damage: OnDamage | None = None
    ) -> Iterator[Observation]:
        """Yield the observations of clients that sent an update, and of secure sums, one by one, in order of round and client.

        Failed, late and masked replies are left out. rounds, clients: read only these; None or empty for all.
        on_damage: function that is called with the error, which names the file, of each row or observation that cannot be read,
                   which is then skipped; None raises the first error, a DamagedFile.
        """
        rows = self.read_rows(rounds=rounds, clients=clients, on_damage=on_damage)
        return _read_undamaged((row for row in rows if row.status == "complete"), self.read_observation, on_damage)

    def read_sent(self, round: int) -> SentModel:
        """Return what the server sent. Raises DamagedFile if the round is not recorded, or its file is missing or damaged."""
        sent = self._sent(round)
        if isinstance(sent, DamagedFile):
            raise sent.with_traceback(None)
        return sent

    def _read_sent_rows(self, which: str, *values: int) -> list[SentRow]:
        lines = index.query_index(self.folder, f"SELECT round, attempt, file, sha256, cohort FROM rounds {which}", *values)
        return [index.make_sent_row(self.folder, line) for line in lines]

    def _try_read_sent(self, round: int) -> SentModel | DamagedFile:
        """Return what the server sent in a round, or the error if it cannot be read.

        The error is a return value, so that it is cached and damaged weights are not read again for each client of the round.
        """
        try:
            rows = self._read_sent_rows("WHERE round = ?", round)
            if not rows:
                raise DamagedFile(
                    self.folder / INDEX_FILE,
                    f"has no global weights of round {round}, which the server sent; copy the recording again, or select other "
                    "rounds",
                )
            weights, buffers = _split_buffers(read_tensors(self.folder, rows[0].file, rows[0].sha256))
            return SentModel(weights, buffers, rows[0].cohort)
        except DamagedFile as error:
            return error


def _read_undamaged(items: Iterable[T], read: Callable[[T], R], on_damage: OnDamage | None) -> Iterator[R]:
    """Yield `read(item)` of each item. Pass a DamagedFile to `on_damage` and continue; raise it if `on_damage` is None."""
    for item in items:
        try:
            read_item = read(item)
        except DamagedFile as error:
            if on_damage is None:
                raise
            on_damage(error)
        else:
            yield read_item


def _check_fit(layout: TensorEntries, sent: SentModel, codec: Codec) -> None:
    """Raise ValueError if names, types or shapes of a reply's tensors do not fit the weights and buffers that were sent.

    A reply may lack buffers.
    """
    payload, buffers = _split_buffers(layout)
    codec.fits(payload, sent.weights)
    if names := sorted(buffers.keys() - sent.buffers.keys()):
        raise ValueError(
            f"the reply has buffer {shorten(names[0])}, which the server did not send in this round; copy the recording again"
        )
    for name, entry in buffers.items():
        with name_parameter(name):
            check_shape(entry, sent.buffers[name])
            check_kind(entry, sent.buffers[name])


def _split_buffers(tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Return the weights or update of a file, and the buffers, whose names begin with `BUFFER_PREFIX`, without this prefix."""
    weights = {name: t for name, t in tensors.items() if not name.startswith(BUFFER_PREFIX)}
    return weights, {name.removeprefix(BUFFER_PREFIX): t for name, t in tensors.items() if name.startswith(BUFFER_PREFIX)}
