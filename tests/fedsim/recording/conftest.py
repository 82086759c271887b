"""A recording to read, and to do harm to."""

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
    """Where the recording lies that `recorded` copies: to write one takes a dozen flushes of the disk."""
    return tmp_path_factory.mktemp("original") / "recording"


@pytest.fixture
def recorded(tmp_path: Path, manifest: Manifest, original: Path) -> Path:
    """A recording of two rounds of two clients, and a third with a failure and an absence."""
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
    """Run a statement on the index of a recording, as its owner could."""

    def change(folder: Path, statement: str, *values: object) -> None:
        with closing(sqlite3.connect(folder / "index.sqlite")) as index, index:
            index.execute("PRAGMA synchronous = OFF")
            assert index.execute(statement, values).rowcount != 0

    return change


@pytest.fixture
def forge(change_index: Callable[..., None]) -> Callable[..., Path]:
    """Replace a file of a recording, checksum and all: the index agrees with what is there then."""

    def replace(folder: Path, name: str, content: bytes) -> Path:
        path = folder / name
        path.write_bytes(content)
        table = "rounds" if path.name == "global.safetensors" else "observations"
        change_index(folder, f"UPDATE {table} SET sha256 = ? WHERE file = ?", hashlib.sha256(content).hexdigest(), name)
        return path

    return replace


@pytest.fixture
def refused() -> Callable[..., DamagedFile]:
    """Reads all of a recording, and checks that a file is named in one line."""

    def check(folder: Path, named: Path | str, words: str | None = None) -> DamagedFile:
        """The error of reading all of the recording, which is to name a file; what is left of it stays readable."""
        with pytest.raises(DamagedFile, match=words) as error:
            list(Recording(folder).read_observations())
        assert error.value.path == folder / named
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 1000
        return error.value

    return check
