"""The SQLite database that is a recording's index: how it is read and written without SQLite ever following a planted link.

SQLite opens files by path, so that anyone who may write to a folder can exchange one between a check and its use. Readers are
given an image of the database that was read through descriptors. The writer works in a folder that only its own user may change,
and compares the file that SQLite opened with the one that was checked.
"""

import atexit
import os
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from fedsim.recording.files import write_bytes
from fedsim.recording.safe_files import DamagedFile, check_status, opened, opened_folder, read_exactly

INDEX = "index.sqlite"
JOURNAL = f"{INDEX}-journal"
MAX_BYTES = 16 * 2**30
IN_MEMORY = 256 * 2**20
"""Bytes of the largest index that is kept in memory while it is read; a larger one is copied to a private file."""
MAX_VALUE = 8 * 2**20
"""Bytes of the longest value: the names of half a million clients."""
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 20,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
}
MAGIC = bytes.fromhex("d9d505f920a163d7")
"""First in a journal, and last in one that names another journal."""
CHUNK = 1 << 20
PINNING = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK)
"""Opens a file without reading it; closing it does not end the locks that SQLite holds on the same file."""
LOCK_START, LOCK_LENGTH = 0x40000002, 510
"""Bytes that SQLite locks: shared by readers, exclusively by a writer while it changes the file."""
LOCK_SECONDS = 5.0
"""Time that a reader waits for a writer's commit."""
KEPT = 1
"""Images that are kept for the next query, in each process."""
SCHEMA = """
BEGIN;
CREATE TABLE IF NOT EXISTS rounds (
    round INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, file TEXT NOT NULL, sha256 TEXT NOT NULL,
    cohort TEXT NOT NULL, sent_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS observations (
    round INTEGER NOT NULL, client TEXT NOT NULL, node TEXT NOT NULL, attempt INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('complete', 'masked', 'failed', 'late')), reason TEXT NOT NULL,
    num_examples INTEGER, file TEXT, sha256 TEXT, codec TEXT, bytes INTEGER NOT NULL,
    metrics TEXT NOT NULL, received_at REAL NOT NULL,
    PRIMARY KEY (round, client)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS observations_by_client ON observations (client, round);
COMMIT;
"""


class Image(NamedTuple):
    """A private copy of an index. state: tells the file that it was made of from an earlier or later one. size: in bytes."""

    state: tuple[object, ...]
    size: int
    connection: sqlite3.Connection


_kept: list[Image] = []


@contextmanager
def opened_image(folder: Path) -> Iterator[Image]:
    """Read the index in `folder` without following links, and open the copy: what is asked of it cannot change the recording.

    Raises DamagedFile where it is no database, or one that would be changed by being read, and sqlite3.Error as SQLite does.
    """
    with opened(folder, INDEX, limit=MAX_BYTES) as file, _locked(file):
        state = _check_header(folder, file)
        try:
            image = _kept.pop()
        except IndexError:
            image = None
        if image is not None and image.state != state:
            image.connection.close()
            image = None
        if image is None:
            image = Image(state, os.fstat(file.fileno()).st_size, _copied(folder, file))
    try:
        yield image
    finally:
        if len(_kept) < KEPT:
            _kept.append(image)
        else:
            image.connection.close()


def forget_images() -> None:
    """Close the images that are kept."""
    while _kept:
        _kept.pop().connection.close()


atexit.register(forget_images)


def make_index(folder: Path) -> None:
    """Write an empty index into `folder`, whole or not at all, where there is none."""
    try:
        if (folder / INDEX).lstat().st_size:
            return
    except FileNotFoundError:
        pass
    with closing(sqlite3.connect(":memory:")) as index:
        index.executescript(SCHEMA)
        write_bytes(folder / INDEX, index.serialize(), below=folder)


def connect_to_write(folder: Path) -> sqlite3.Connection:
    """Open the index in `folder`, which only this user may change, for writing.

    Raises DamagedFile where something other than the index was opened, and ValueError where others may exchange it.
    """
    path = folder / INDEX
    with opened_folder(folder) as at:
        _check_owner(folder, os.fstat(at))
        try:
            pinned = os.open(INDEX, PINNING | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        except OSError as error:
            raise DamagedFile(path, error.strerror or str(error)) from None
    try:  # while a descriptor holds it, no other file is given its number
        status = os.fstat(pinned)
        _check_to_write(folder, status)
        connection = sqlite3.connect(path)
        if not _is_open(status, besides=pinned):  # nothing was read or written yet
            connection.close()
            raise DamagedFile(path, "was exchanged while it was opened")
        return connection
    finally:
        os.close(pinned)


def _check_to_write(folder: Path, status: os.stat_result) -> None:
    """Raise DamagedFile where the index is a link, or SQLite would do more than roll back a commit that was cut off."""
    try:
        check_status(status)
    except ValueError as error:
        raise DamagedFile(folder / INDEX, str(error)) from None
    if os.path.lexists(folder / JOURNAL):
        with opened(folder, JOURNAL, limit=MAX_BYTES) as journal:
            _check_journal(journal, status.st_size + os.fstat(journal.fileno()).st_size, folder / JOURNAL)


def _check_owner(folder: Path, status: os.stat_result) -> None:
    if os.name != "posix":  # owners and modes are told elsewhere
        return
    if status.st_uid != os.geteuid():
        raise ValueError(
            f"{folder} belongs to user {status.st_uid}, who could exchange what user {os.geteuid()} writes; copy the run with "
            "cp -r, or give it to this user with chown -R"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{folder} can be changed by other users, who could exchange what is written; chmod go-w {folder}")


def _is_open(status: os.stat_result, *, besides: int) -> bool:
    """Return whether this process has another descriptor of a file; True where the system does not tell."""
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd") if int(name) != besides]
    except OSError:
        return True
    for descriptor in descriptors:
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), status):
                return True
    return False


@contextmanager
def _locked(file: FileIO) -> Iterator[None]:
    """Keep writers of SQLite from changing the file. On systems without such locks, none is held."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, LOCK_LENGTH, LOCK_START)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() > until:
                raise ValueError("is being written to without an end; stop the federation, or wait for it") from None
            time.sleep(0.005)
        except OSError:  # a file system without locks
            break
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, LOCK_LENGTH, LOCK_START)


def _check_header(folder: Path, file: FileIO) -> tuple[object, ...]:
    """Return what distinguishes this state of an index from others; the header counts commits.

    Raises ValueError where the file is no database, or one that reading would change.
    """
    start = file.read(100)
    if not start.startswith(b"SQLite format 3\0") or len(start) < 100:
        raise ValueError("file is not a database")
    if start[18:20] != b"\1\1" or os.path.lexists(folder / f"{INDEX}-wal") or os.path.lexists(folder / f"{INDEX}-shm"):
        raise ValueError("keeps its changes in a way that no recorder uses")
    try:
        journal = (folder / JOURNAL).lstat()
    except FileNotFoundError:
        beside: tuple[int, ...] = ()
    else:
        if not stat.S_ISREG(journal.st_mode):
            raise DamagedFile(folder / JOURNAL, "is no regular file")
        beside = _state(journal)
    return str(folder), *_state(os.fstat(file.fileno())), *beside, start


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _copied(folder: Path, file: FileIO) -> sqlite3.Connection:
    """Return a copy of an index as a database, in memory where it is small enough.

    A journal beside the index belongs to a writer that was killed during a commit, or has not changed the index yet. SQLite rolls
    the commit back in the copy, which changes nothing in the second case.
    """
    file.seek(0)
    size = os.fstat(file.fileno()).st_size
    interrupted = os.path.lexists(folder / JOURNAL)
    if not interrupted and size <= IN_MEMORY:
        return _prepared(_in_memory(file.read()))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as private:
        copy = Path(private) / INDEX
        _copy(file, copy)
        if interrupted:
            with opened(folder, JOURNAL, limit=MAX_BYTES) as journal:
                _copy(journal, Path(private) / JOURNAL)
                _check_journal(journal, size + os.fstat(journal.fileno()).st_size, folder / JOURNAL)
            with closing(sqlite3.connect(copy)) as index:
                index.execute("PRAGMA synchronous = OFF")
                index.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if copy.stat().st_size <= IN_MEMORY:
            return _prepared(_in_memory(copy.read_bytes()))
        return _prepared(sqlite3.connect(f"{copy.as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False))


def _in_memory(content: bytes) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.deserialize(content)
    return connection


def _prepared(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Have SQLite run nothing out of a database, and change nothing in it."""
    for limit, value in LIMITS.items():
        connection.setlimit(limit, value)
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _copy(file: FileIO, to: Path) -> None:
    file.seek(0)
    with to.open("xb") as copy:
        while part := file.read(CHUNK):
            copy.write(part)


def _check_journal(file: FileIO, size: int, path: Path) -> None:
    """Raise DamagedFile where rolling back by this journal would do more than restore pages.

    A journal may end with the name of another file, which SQLite deletes afterwards, and it declares the size to which SQLite
    extends the database.
    """
    file.seek(0)
    start = memoryview(bytearray(28))
    try:
        read_exactly(file, start)
    except ValueError:
        return
    file.seek(-8, os.SEEK_END)
    if file.read(8) == MAGIC:
        raise DamagedFile(path, "names another journal, which no recorder does")
    pages, page = (int.from_bytes(start[at : at + 4], "big") for at in (16, 24))
    if pages * (page or 65536) > size:
        raise DamagedFile(path, f"says that the index had {pages} pages, more than there can have been")
