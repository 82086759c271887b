"""Changes of recordings, as damage, an attacker or another program could make them."""

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fedsim.recording import DamagedFile, Recording


def change_index(recording: Path, statement: str, *values: object) -> None:
    """Run an SQL statement, which must change rows, on the index of a recording."""
    with closing(sqlite3.connect(recording / "index.sqlite")) as index, index:
        index.execute("PRAGMA synchronous = OFF")
        assert index.execute(statement, values).rowcount != 0


def add_round(recording: Path, number: int) -> None:
    """Add a round to the index of a recording, with copies of the rows of round 1, whose answers are late."""
    row = "INSERT INTO observations SELECT ?, client, node, 1, 'late', '', NULL, NULL, NULL, NULL, 0, '{}', received_at + 10"
    change_index(recording, f"{row} FROM observations WHERE round = 1", number)


def change_manifest(recording: Path, **entries: object) -> None:
    """Replace top-level entries of the manifest of a recording."""
    path = recording / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def forge(recording: Path, name: str, content: bytes) -> Path:
    """Replace a file of a recording and its checksum in the index."""
    path = recording / name
    path.write_bytes(content)
    table = "rounds" if path.name == "global.safetensors" else "observations"
    change_index(recording, f"UPDATE {table} SET sha256 = ? WHERE file = ?", hashlib.sha256(content).hexdigest(), name)
    return path


def check_damage(recording: Path, named: Path | str, words: str | None = None) -> DamagedFile:
    """Read all of a recording; return the error, after checking that it names the given file in a short line."""
    with pytest.raises(DamagedFile, match=words) as error:
        list(Recording(recording).read_observations())
    assert error.value.path == recording / named
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
    return error.value
