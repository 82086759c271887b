"""Writes a recording: append-only, every file whole or absent, the index row last."""

import hashlib
import json
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from fedsim.wire.codec import Payload
from fedsim.wire.files import make_private, tensors_to_bytes, write_bytes
from fedsim.wire.manifest import Manifest

SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (
    round INTEGER PRIMARY KEY, file TEXT NOT NULL, sha256 TEXT NOT NULL, sent_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS observations (
    round INTEGER NOT NULL, client TEXT NOT NULL, node TEXT NOT NULL, attempt INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('complete', 'failed', 'late')), reason TEXT NOT NULL,
    num_examples INTEGER, cohort TEXT NOT NULL, file TEXT, sha256 TEXT, codec TEXT, bytes INTEGER NOT NULL,
    metrics TEXT NOT NULL, received_at REAL NOT NULL,
    PRIMARY KEY (round, client)
);
"""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came back from one client in one round, or that nothing did.

    client:  its pseudonym, or its node id where it sent none.
    node:    Flower's node id, as text: it exceeds what JSON numbers hold.
    reason:  why there is no payload, where there is none.
    bytes:   size of the reply on the wire.
    """

    client: str
    node: str
    attempt: int = 1
    status: Literal["complete", "failed", "late"] = "complete"
    reason: str = ""
    payload: Payload | None = None
    num_examples: int | None = None
    bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


def is_plain(client: str) -> bool:
    """Whether a client's name can name a file of a recording: a client sends it, so it may be anything."""
    return re.fullmatch(r"[A-Za-z0-9_-]{1,64}", client) is not None and client != "global"


class Recorder:
    """An append-only recording in `folder`. Used by one thread."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = make_private(folder)
        manifest.write(folder / "manifest.json")
        self._index = sqlite3.connect(folder / "index.sqlite")
        (folder / "index.sqlite").chmod(0o600)
        self._index.executescript(SCHEMA)

    def sent(self, round: int, weights: Mapping[str, Tensor]) -> None:
        """Write down the global weights that a round starts from."""
        file = self._round_folder(round) / "global.safetensors"
        sha256 = self._write(file, weights)
        with self._index:
            self._index.execute(
                "INSERT INTO rounds VALUES (?, ?, ?, ?)", (round, str(file.relative_to(self.folder)), sha256, time.time())
            )

    def received(self, round: int, reply: Reply, cohort: Sequence[str]) -> None:
        """Write down one reply, or its absence. Raises ValueError where the client's name cannot name a file."""
        if not is_plain(reply.client):
            raise ValueError(f"client {reply.client!r}: a name is letters, digits, '-' and '_', and not 'global'")
        file = sha256 = codec = None
        if reply.payload is not None:
            path = self._round_folder(round) / f"{reply.client}.safetensors"
            sha256 = self._write(path, reply.payload.tensors)
            file, codec = str(path.relative_to(self.folder)), reply.payload.codec
        row = (
            *(round, reply.client, reply.node, reply.attempt, reply.status, reply.reason, reply.num_examples),
            *(json.dumps(list(cohort)), file, sha256, codec, reply.bytes, json.dumps(dict(reply.metrics)), time.time()),
        )
        with self._index:
            self._index.execute(f"INSERT INTO observations VALUES ({', '.join('?' * len(row))})", row)

    def close(self) -> None:
        self._index.close()

    def _round_folder(self, round: int) -> Path:
        return make_private(make_private(self.folder / "rounds") / f"{round:05d}")

    def _write(self, path: Path, tensors: Mapping[str, Tensor]) -> str:
        content = tensors_to_bytes(tensors)
        write_bytes(path, content)
        return hashlib.sha256(content).hexdigest()
