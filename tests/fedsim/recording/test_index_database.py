"""Tests of safe access to the index: SQLite opens files by path, so that a file could be exchanged after it was checked."""

import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fedsim.recording import DamagedFile, Manifest, Recorder, Recording, index_database
from fedsim.recording.index_database import INDEX_FILE, close_images, connect_to_write

Connect = Callable[..., sqlite3.Connection]


@pytest.fixture(autouse=True)
def fresh() -> None:
    close_images()


def test_a_reader_lets_sqlite_open_no_file_of_the_recording(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def connect(path: str, **given: object) -> sqlite3.Connection:
        asked.append(str(path))
        return real(path, **given)

    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", connect)
    assert len(Recording(recorded).read_rows()) == 6
    assert not [path for path in asked if str(recorded) in path]


@pytest.mark.parametrize("plant", ["link", "pipe", "other file"])
def test_a_writer_refuses_an_index_that_is_exchanged_while_sqlite_opens_it(
    recorded: Path, tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    recorder, real = Recorder(recorded, manifest), sqlite3.connect
    victim = tmp_path / "victim.sqlite"
    victim.write_bytes((recorded / INDEX_FILE).read_bytes())
    before = victim.read_bytes()

    def connect(path: Path, *given: object) -> sqlite3.Connection:
        (recorded / INDEX_FILE).unlink()
        if plant == "link":
            (recorded / INDEX_FILE).symlink_to(victim)
        elif plant == "pipe":
            os.mkfifo(recorded / INDEX_FILE)
        else:
            (recorded / INDEX_FILE).write_bytes(before)
        return real(path)

    monkeypatch.setattr(sqlite3, "connect", connect)
    with pytest.raises((DamagedFile, sqlite3.Error)):
        recorder.roll_back(0)
    assert victim.read_bytes() == before


@pytest.mark.parametrize("name", [INDEX_FILE, index_database.JOURNAL_FILE])
def test_a_writer_follows_no_link(recorded: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes((recorded / INDEX_FILE).read_bytes())
    (recorded / name).unlink(missing_ok=True)
    (recorded / name).symlink_to(victim)
    with pytest.raises(DamagedFile, match=r"symbolic link|not a regular file"):
        connect_to_write(recorded)


def test_a_writer_deletes_nothing_that_a_journal_names(recorded: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    text = str(victim).encode()
    header = index_database.JOURNAL_MAGIC + bytes(20) + bytes(512)
    named = (2**30 // 4096 + 1).to_bytes(4, "big") + text + len(text).to_bytes(4, "big") + sum(text).to_bytes(4, "big")
    (recorded / index_database.JOURNAL_FILE).write_bytes(header + named + index_database.JOURNAL_MAGIC)
    with pytest.raises(DamagedFile, match="names another file at its end"):
        connect_to_write(recorded)
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_writer_refuses_a_folder_that_others_may_change(recorded: Path, mode: int) -> None:
    recorded.chmod(mode)
    with pytest.raises(ValueError, match="chmod go-w"):
        connect_to_write(recorded)
    assert len(Recording(recorded).read_rows()) == 6


def test_a_readers_copy_of_the_index_is_kept_until_the_index_changes(
    recorded: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Path] = []
    real = index_database._copy_index

    def counted(folder: Path, *given: object) -> sqlite3.Connection:
        copied.append(folder)
        return real(folder, *given)

    monkeypatch.setattr(index_database, "_copy_index", counted)
    assert [len(Recording(recorded).read_rows()) for _ in range(3)] == [6, 6, 6]
    assert len(copied) == 1
    Recorder(recorded, manifest).roll_back(2)
    assert len(Recording(recorded).read_rows()) == 4
    assert len(copied) == 2


def test_an_index_too_large_for_memory_is_read_as_well(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_database, "MAX_MEMORY_BYTES", 1)
    assert [len(Recording(recorded).read_rows()) for _ in range(2)] == [6, 6]


LOCKING = """
import sqlite3, sys
index = sqlite3.connect(sys.argv[1], isolation_level=None)
index.execute("BEGIN EXCLUSIVE")
index.execute("DELETE FROM observations WHERE round = 3")
print("locked", flush=True)
sys.stdin.readline()
index.execute("COMMIT")
"""


def test_a_reader_waits_for_a_commit(recorded: Path) -> None:
    """Otherwise, it could read an index in the middle of a commit."""
    import subprocess
    import sys

    words = [sys.executable, "-c", LOCKING, str(recorded / INDEX_FILE)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout.readline() == "locked\n"
        threading.Timer(0.3, lambda: writer.stdin and writer.stdin.close()).start()
        assert len(Recording(recorded).read_rows()) == 4


def test_a_reader_gives_up_if_the_index_stays_locked(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_database, "LOCK_SECONDS", 0.05)

    def busy(*given: object) -> None:
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "lockf", busy)
    with pytest.raises(DamagedFile, match="locked by a writer"):
        Recording(recorded).read_rows()


def test_a_fresh_index_has_the_tables_of_a_recorder(tmp_path: Path) -> None:
    index_database.make_index(tmp_path)
    assert (tmp_path / INDEX_FILE).stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(tmp_path / INDEX_FILE)) as index:
        assert index.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert index.execute("PRAGMA integrity_check").fetchone() == ("ok",)
