"""Fixtures: a recording, and functions that damage it."""

import hashlib
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from fedsim.recording import DamagedFile, Manifest, Recorder, Recording, Reply
from fedsim.recording.codec import encode


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the recording that `recorded` copies; copying is faster, since writing flushes the disk a dozen times."""
    return tmp_path_factory.mktemp("original") / "recording"


@pytest.fixture
def recorded(tmp_path: Path, manifest: Manifest, original: Path) -> Path:
    """A recording of two rounds of two clients, and of a third round with a failed and a late client."""
    if not original.exists():
        write(original, manifest)
    shutil.copytree(original, tmp_path / "recording")
    return tmp_path / "recording"


def write(folder: Path, manifest: Manifest) -> None:
    recorder = Recorder(folder, manifest)
    cohort = ("anna", "bert")
    for round in (1, 2):
        recorder.record_sent(round, {"w": torch.full((3,), float(round)), "b": torch.tensor(0.0)})
        for number, client in enumerate(cohort):
            update = {"w": torch.full((3,), round + number / 10), "b": torch.tensor(float(number))}
            recorder.record_reply(round, Reply(client=client, node=str(2**63 + number), payload=encode(update), num_examples=7))
        recorder.commit(round, cohort)
    recorder.record_sent(3, {"w": torch.zeros(3)})
    recorder.record_reply(3, Reply(client="anna", node="1", status="failed", reason="out of memory"))
    recorder.record_reply(3, Reply(client="bert", node="2", status="late", reason="no answer in time"))
    recorder.commit(3, cohort)


@pytest.fixture
def change_index() -> Callable[..., None]:
    """A function that runs an SQL statement on the index of a recording."""

    def change(folder: Path, statement: str, *values: object) -> None:
        with closing(sqlite3.connect(folder / "index.sqlite")) as index, index:
            index.execute("PRAGMA synchronous = OFF")
            assert index.execute(statement, values).rowcount != 0

    return change


@pytest.fixture
def forge(change_index: Callable[..., None]) -> Callable[..., Path]:
    """A function that replaces a file of a recording and its checksum in the index."""

    def replace(folder: Path, name: str, content: bytes) -> Path:
        path = folder / name
        path.write_bytes(content)
        table = "rounds" if path.name == "global.safetensors" else "observations"
        change_index(folder, f"UPDATE {table} SET sha256 = ? WHERE file = ?", hashlib.sha256(content).hexdigest(), name)
        return path

    return replace


@pytest.fixture
def refused() -> Callable[..., DamagedFile]:
    """A function that reads a recording and checks that the error names a file in one line."""

    def check(folder: Path, named: Path | str, words: str | None = None) -> DamagedFile:
        """Read all of the recording; return the error, after checking that it names the given file in a short line."""
        with pytest.raises(DamagedFile, match=words) as error:
            list(Recording(folder).read_observations())
        assert error.value.path == folder / named
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 1000
        return error.value

    return check
