"""Writer of a recording: a folder with the weights that the server sent and the replies that it received, round by round."""

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fedsim.recording.codec import Payload
from fedsim.recording.files import flush, make_private, write_tensors
from fedsim.recording.index_database import connect_to_write, make_index
from fedsim.recording.manifest import Manifest
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.run_check import check_run

BUFFER_PREFIX = "buffer:"
"""Prefix of the names of buffers in files that also hold weights."""
MAX_REASON = 2000
"""Number of characters that are kept of texts that a client sends."""
MAX_METRICS = 100
"""Largest number of metrics of one reply that are kept."""
MAX_EXAMPLES = 2**53
"""Upper limit of a reported number of examples."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The reply of one client in one round, or the reason for its absence.

    client:  the client's name: its pseudonym, or otherwise its node id; SUM_CLIENT for the sum of secure aggregation.
    node:    Flower's node id as text, since it exceeds the range of JSON numbers; "" for the sum.
    status:  "complete" if it sent an update, "masked" if its masked update is in the round's sum of secure aggregation, "late" if
             an answer did not come in time, otherwise "failed": an error, a malformed message, or a sum that could not be
             computed.
    reason:  why the client failed or was late; otherwise empty. A client that failed or was late after its masked update came has
             a reason, too, although its status may be "masked".
    payload: what the client sent: an encoded update or, with secure aggregation, a masked one with public keys. None if none of
             these came, or if they are not to be recorded.
    buffers: batch-norm statistics that the client sent with the update, by name.
    num_examples, metrics: number of examples and metrics that the client reported; for the sum, those of the whole round.
    bytes:   size of the reply's content in bytes.
    """

    client: str
    node: str
    status: Literal["complete", "masked", "failed", "late"] = "complete"
    reason: str = ""
    payload: Payload | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    num_examples: int | None = None
    bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


def is_plain(client: str) -> bool:
    """Return whether `client` is allowed as a client's name, so that it is also safe as a file name.

    It must have 1 to 64 of the characters A-Z a-z 0-9 - _, and must not be "global" or `SUM_CLIENT`, which a recording uses
    itself.
    """
    return re.fullmatch(r"[A-Za-z0-9_-]{1,64}", client) is not None and client not in ("global", SUM_CLIENT)


class Recorder:
    """A writer that creates the recording in `folder`, or continues the one that is there.

    manifest: the run's public settings, which are written into a new recording. A recording that is there already keeps its own
              manifest, and the two are not compared.
    For each round, call `record_sent`, then `record_reply` for each reply, then `commit`. A round that is not committed does not
    become part of the recording.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = make_private(folder)
        check_run(folder)
        if not (folder / "manifest.json").exists():
            manifest.write(folder / "manifest.json")
        make_index(folder)
        self._pending: dict[str, list[tuple[Any, ...]]] = {"rounds": [], "observations": []}

    def record_sent(self, round: int, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> None:
        """Write the weights and buffers that the server sends in a round. Uncommitted rows of an earlier round are dropped."""
        self._pending = {"rounds": [], "observations": []}
        path = self._make_round_folder(round) / "global.safetensors"
        sha256 = write_tensors(path, _join_tensors(weights, buffers or {}), below=self.folder, settle=False)
        self._pending["rounds"].append((self._to_relative(path), sha256, time.time()))

    def record_reply(self, round: int, reply: Reply) -> None:
        """Write a reply's payload and buffers to a file, if it has a payload, and keep its row for the index until `commit`.

        Raises ValueError if the client's name is neither SUM_CLIENT nor allowed by `is_plain`, or if `num_examples` is negative
        or at least `MAX_EXAMPLES`.
        """
        if not is_plain(reply.client) and reply.client != SUM_CLIENT:
            raise ValueError(
                f"client {reply.client!r}: use only letters, digits, '-' and '_', 1 to 64 of them, and not the names 'global' "
                "and 'sum'"
            )
        if reply.num_examples is not None and not 0 <= reply.num_examples < MAX_EXAMPLES:
            raise ValueError(
                f"client {reply.client}: num_examples must be at least 0 and below {MAX_EXAMPLES}, got {reply.num_examples}"
            )
        file = sha256 = codec = None
        if reply.payload is not None:
            path = self._make_round_folder(round) / f"{reply.client}.safetensors"
            sha256 = write_tensors(path, _join_tensors(reply.payload.tensors, reply.buffers), below=self.folder, settle=False)
            file, codec = self._to_relative(path), reply.payload.codec
        metrics = {_to_printable(name): value for name, value in sorted(reply.metrics.items())[:MAX_METRICS]}
        self._pending["observations"].append(
            (
                *(reply.client, reply.node, reply.status, _to_printable(reply.reason), reply.num_examples),
                *(file, sha256, codec, reply.bytes, json.dumps(metrics), time.time()),
            )
        )

    def commit(self, round: int, cohort: Sequence[str], *, attempt: int = 1) -> None:
        """Add a round to the recording: the rows that `record_sent` and `record_reply` kept, in one transaction.

        cohort: names of all clients that were asked, also of those that did not answer.
        attempt: 1 plus the number of times that the run was resumed before this round.
        """
        rounds, observations = self._pending["rounds"], self._pending["observations"]
        for folder in (self._make_round_folder(round), self.folder / "rounds"):
            flush(folder)
        with closing(connect_to_write(self.folder)) as index, index:
            index.executemany(
                "INSERT INTO rounds (round, attempt, cohort, file, sha256, sent_at) VALUES (?, ?, ?, ?, ?, ?)",
                [(round, attempt, json.dumps(list(cohort)), *row) for row in rounds],
            )
            index.executemany(
                "INSERT INTO observations (round, attempt, client, node, status, reason, num_examples, file, sha256, codec, "
                f"bytes, metrics, received_at) VALUES ({', '.join('?' * 13)})",
                [(round, attempt, *row) for row in observations],
            )
        self._pending = {"rounds": [], "observations": []}

    def roll_back(self, after: int) -> None:
        """Remove all rounds after round `after`, and partial files that a crash left."""
        with closing(connect_to_write(self.folder)) as index, index:
            for table in ("rounds", "observations"):
                index.execute(f"DELETE FROM {table} WHERE round > ?", (after,))
        for path in (self.folder / "rounds").glob("*"):
            if path.name.isdigit() and int(path.name) > after:
                shutil.rmtree(path)
        for path in self.folder.rglob(".*.partial"):
            path.unlink()

    def count_rounds(self) -> int:
        """Return the number of rounds in the recording so far."""
        with closing(connect_to_write(self.folder)) as index:
            (count,) = index.execute("SELECT count(*) FROM rounds").fetchone()
        return int(count)

    def list_recorded_clients(self) -> set[str]:
        """Return the names of the clients that have at least one file in the recording so far, without "sum", the secure sum.

        Clients that are not selected for recording have no file. Under secure aggregation they have rows in the index, though.
        """
        with closing(connect_to_write(self.folder)) as index:
            clients = index.execute("SELECT DISTINCT client FROM observations WHERE file IS NOT NULL")
            return {client for (client,) in clients} - {SUM_CLIENT}

    def _to_relative(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _make_round_folder(self, round: int) -> Path:
        return make_private(self.folder / "rounds" / f"{round:05d}", below=self.folder)


def _to_printable(text: str) -> str:
    return text[:MAX_REASON].encode("utf-8", "replace").decode()


def _join_tensors(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, **{BUFFER_PREFIX + name: t for name, t in buffers.items()}}
