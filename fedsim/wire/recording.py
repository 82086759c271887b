"""Reads a recording, lazily, and never executes anything from it."""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fedsim.wire.codec import Payload
from fedsim.wire.manifest import Manifest
from fedsim.wire.observation import Observation


class DamagedFile(ValueError):
    """A file of a recording that is missing or not what its index says."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the index: a client's reply in a round, or that there was none."""

    round: int
    client: str
    node: str
    attempt: int
    status: str
    reason: str
    num_examples: int | None
    cohort: tuple[str, ...]
    file: str | None
    sha256: str | None
    codec: str | None
    bytes: int
    metrics: Mapping[str, float]
    received_at: float

    @property
    def key(self) -> str:
        return f"{self.round:05d}-{self.client}"


class Recording:
    """A recording on disk: its manifest, its index, and one `Observation` at a time."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder / "manifest.json")
        self._weights = lru_cache(maxsize=2)(self._read_weights)

    def fingerprint(self) -> str:
        """Tells this recording from others: a digest of its manifest and of the first weights that were sent."""
        with closing(self._connect()) as index:
            first = index.execute("SELECT sha256 FROM rounds ORDER BY round LIMIT 1").fetchone()
        content = (self.folder / "manifest.json").read_text() + (first["sha256"] if first else "")
        return hashlib.sha256(content.encode()).hexdigest()

    def rows(self, *, rounds: set[int] | None = None, clients: set[str] | None = None) -> list[Row]:
        """The index in order of round and client, of `rounds` and `clients` only where given."""
        try:
            with closing(self._connect()) as index:
                found = index.execute("SELECT * FROM observations ORDER BY round, client").fetchall()
        except sqlite3.Error as error:
            raise DamagedFile(f"{self.folder / 'index.sqlite'}: {error}") from None
        rows = [self._row(row) for row in found]
        return [row for row in rows if (not rounds or row.round in rounds) and (not clients or row.client in clients)]

    def observation(self, row: Row) -> Observation:
        """Read one observation. Raises DamagedFile, naming the file, where its checksum does not hold."""
        if row.file is None or row.sha256 is None or row.codec is None:
            raise ValueError(f"round {row.round}, client {row.client}: nothing was received ({row.status}: {row.reason})")
        m = self.manifest
        return Observation(
            round=row.round,
            client=row.client,
            cohort=row.cohort,
            num_examples=row.num_examples,
            model=m.model,
            data=m.data,
            training=m.training,
            defenses=m.defense,
            weights=self._weights(row.round),
            payload=Payload(tensors=self._read(row.file, row.sha256), codec=row.codec),
            metrics=row.metrics,
        )

    def observations(self, *, rounds: set[int] | None = None, clients: set[str] | None = None) -> Iterator[Observation]:
        """All complete observations, lazily."""
        return (self.observation(row) for row in self.rows(rounds=rounds, clients=clients) if row.status == "complete")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect((self.folder / "index.sqlite").resolve().as_uri() + "?mode=ro", uri=True)
        connection.row_factory = sqlite3.Row
        return connection

    @staticmethod
    def _row(row: sqlite3.Row) -> Row:
        values = dict(row)
        return Row(**{**values, "cohort": tuple(json.loads(values["cohort"])), "metrics": json.loads(values["metrics"])})

    def _read_weights(self, round: int) -> dict[str, Tensor]:
        with closing(self._connect()) as index:
            row = index.execute("SELECT file, sha256 FROM rounds WHERE round = ?", (round,)).fetchone()
        if row is None:
            raise DamagedFile(f"{self.folder}: the index has no global weights of round {round}")
        return self._read(row["file"], row["sha256"])

    def _read(self, file: str, sha256: str) -> dict[str, Tensor]:
        path = self.folder / file
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise DamagedFile(f"{file}: lies outside the recording")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DamagedFile(f"{path}: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != sha256:
            raise DamagedFile(f"{path}: its checksum differs from the index")
        try:
            return load(content)
        except SafetensorError as error:
            raise DamagedFile(f"{path}: {error}") from None
