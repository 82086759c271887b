"""Safe access to the SQLite database of a recording's index, in a folder that an attacker may have prepared.

SQLite opens files by path, so that anyone who may write to a folder could replace a file between its check and its use. Readers
therefore query a private copy of the database, made without following links. The writer requires a folder that belongs to its
own user and that others may not write to.
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
from fedsim.recording.safe_files import DamagedFile, check_status, open_file, open_folder, read_exactly

INDEX_FILE = "index.sqlite"
JOURNAL_FILE = f"{INDEX_FILE}-journal"
MAX_BYTES = 16 * 2**30
MAX_MEMORY_BYTES = 256 * 2**20
"""Largest size in bytes of an index that is copied to memory; a larger one is copied to a private file."""
MAX_VALUE_BYTES = 8 * 2**20
"""Largest size of a value in bytes, enough for the names of half a million clients."""
SQLITE_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 20,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
}
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""First bytes of a journal, and last bytes of a journal that names another one."""
CHUNK_BYTES = 1 << 20
PINNING_FLAGS = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK)
"""Flags that open a file without access to its content; closing it does not release SQLite's locks on the same file."""
LOCK_START, LOCK_LENGTH = 0x40000002, 510
"""Range of bytes that SQLite locks: shared for readers, exclusive for a writer while it changes the file."""
LOCK_SECONDS = 5.0
"""Seconds that a reader waits for a writer's commit."""
NUM_KEPT_IMAGES = 1
"""Number of copies of an index (`Image`) that each process keeps in memory for the next query."""
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
    """A private copy of an index, opened for queries: in memory or, above `MAX_MEMORY_BYTES`, in a temporary file.

    state: values that identify the version of the recording's index from which the copy was made.
    size:  size in bytes of the recording's index at that time.
    """

    state: tuple[object, ...]
    size: int
    connection: sqlite3.Connection


_kept: list[Image] = []


@contextmanager
def open_image(folder: Path) -> Iterator[Image]:
    """Open a private copy of the index in `folder` within a `with` block. Queries cannot change the recording.

    The index is read without following links. Raises DamagedFile if it is missing or a link, is not a database, is in a mode in
    which reading changes it (write-ahead log), or stays locked by a writer for `LOCK_SECONDS`. Raises sqlite3.Error if SQLite
    cannot read it.
    """
    with open_file(folder, INDEX_FILE, limit=MAX_BYTES) as file, _hold_shared_lock(file):
        state = _check_header(folder, file)
        image: Image | None = None
        with suppress(IndexError):
            image = _kept.pop()
        if image is not None and image.state != state:
            image.connection.close()
            image = None
        if image is None:
            image = Image(state, os.fstat(file.fileno()).st_size, _copy_index(folder, file))
    try:
        yield image
    finally:
        if len(_kept) < NUM_KEPT_IMAGES:
            _kept.append(image)
        else:
            image.connection.close()


def close_images() -> None:
    """Close the copies of the index that this process keeps open for the next query."""
    while _kept:
        _kept.pop().connection.close()


atexit.register(close_images)


def make_index(folder: Path) -> None:
    """Write an index without rows atomically into `folder`, unless it has one already. A file of 0 bytes is replaced."""
    try:
        if (folder / INDEX_FILE).lstat().st_size:
            return
    except FileNotFoundError:
        pass
    with closing(sqlite3.connect(":memory:")) as index:
        index.executescript(SCHEMA)
        write_bytes(folder / INDEX_FILE, index.serialize(), below=folder)


def connect_to_write(folder: Path) -> sqlite3.Connection:
    """Return a connection to the index in `folder`, for writing.

    Raises ValueError if the folder belongs to another user, or others may write to it. Raises DamagedFile if the index is missing
    or a link, was replaced while it was opened, or has a suspicious journal (the file with which SQLite undoes an unfinished
    commit).
    """
    path = folder / INDEX_FILE
    with open_folder(folder) as at:
        _check_owner(folder, os.fstat(at))
        try:
            pinned = os.open(INDEX_FILE, PINNING_FLAGS | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        except OSError as error:
            raise DamagedFile(path, error.strerror or str(error)) from None
    try:  # while a descriptor holds the file, its inode number is not reused
        status = os.fstat(pinned)
        _check_to_write(folder, status)
        connection = sqlite3.connect(path)
        if not _is_open(status, besides=pinned):  # SQLite has not read or written anything yet
            connection.close()
            raise DamagedFile(path, "was replaced while it was opened; check who may write to its folder")
        return connection
    finally:
        os.close(pinned)


def _check_to_write(folder: Path, status: os.stat_result) -> None:
    """Raise DamagedFile if the index is not a regular file or has several names (hard links), or its journal is suspicious.

    status: result of `os.fstat` for the index in `folder`. Suspicious: see `_check_journal`.
    """
    try:
        check_status(status)
    except ValueError as error:
        raise DamagedFile(folder / INDEX_FILE, str(error)) from None
    if os.path.lexists(folder / JOURNAL_FILE):
        with open_file(folder, JOURNAL_FILE, limit=MAX_BYTES) as journal:
            _check_journal(journal, status.st_size + os.fstat(journal.fileno()).st_size, folder / JOURNAL_FILE)


def _check_owner(folder: Path, status: os.stat_result) -> None:
    """Raise ValueError if the folder belongs to another user, or its group or all users may write to it.

    status: result of `os.fstat` for the folder. On Windows nothing is checked.
    """
    if os.name != "posix":  # other systems have no POSIX owners and modes
        return
    if status.st_uid != os.geteuid():
        raise ValueError(
            f"{folder} belongs to user {status.st_uid}, who could replace files that user {os.geteuid()} writes; copy the run "
            "with cp -r, or give it to this user with chown -R"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{folder} can be changed by other users, who could replace its files; run chmod go-w {folder}")


def _is_open(status: os.stat_result, *, besides: int) -> bool:
    """Return whether this process has the file with this `status` open under a descriptor other than `besides`.

    Without /proc, as on macOS and Windows, this is unknown and the answer is True.
    """
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
def _hold_shared_lock(file: FileIO) -> Iterator[None]:
    """Hold SQLite's shared lock on the file within a `with` block, so that no writer changes it.

    On Windows, and on file systems without locks, nothing is locked. Raises ValueError if a writer holds its exclusive lock for
    longer than `LOCK_SECONDS`.
    """
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
                raise ValueError(
                    f"is locked by a writer for over {LOCK_SECONDS:g} s; stop the federation, or wait for it"
                ) from None
            time.sleep(0.005)
        except OSError:  # a file system without locks
            break
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, LOCK_LENGTH, LOCK_START)


def _check_header(folder: Path, file: FileIO) -> tuple[object, ...]:
    """Return values that identify the current version of an index, from its header and the state of its files.

    Raises ValueError if the file is not a database, or is in write-ahead mode, in which reading changes it. Raises DamagedFile if
    its journal is not a regular file.
    """
    start = file.read(100)
    if not start.startswith(b"SQLite format 3\0") or len(start) < 100:
        raise ValueError("is not an SQLite database; copy the recording again")
    if start[18:20] != b"\1\1" or os.path.lexists(folder / f"{INDEX_FILE}-wal") or os.path.lexists(folder / f"{INDEX_FILE}-shm"):
        raise ValueError("is in write-ahead mode, so another program has written to it; copy the recording again")
    try:
        journal = (folder / JOURNAL_FILE).lstat()
    except FileNotFoundError:
        beside: tuple[int, ...] = ()
    else:
        if not stat.S_ISREG(journal.st_mode):
            raise DamagedFile(folder / JOURNAL_FILE, "is not a regular file, so SQLite did not write it; delete it")
        beside = _read_state(journal)
    return str(folder), *_read_state(os.fstat(file.fileno())), *beside, start


def _read_state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _copy_index(folder: Path, file: FileIO) -> sqlite3.Connection:
    """Return a connection to a private copy of an index: in memory or, above `MAX_MEMORY_BYTES`, in a temporary file.

    If there is a journal, a commit did not end. SQLite then undoes it in the copy.
    """
    file.seek(0)
    size = os.fstat(file.fileno()).st_size
    interrupted = os.path.lexists(folder / JOURNAL_FILE)
    if not interrupted and size <= MAX_MEMORY_BYTES:
        return _restrict(_open_in_memory(file.read()))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as private:
        copy = Path(private) / INDEX_FILE
        _copy_file(file, copy)
        if interrupted:
            with open_file(folder, JOURNAL_FILE, limit=MAX_BYTES) as journal:
                _copy_file(journal, Path(private) / JOURNAL_FILE)
                _check_journal(journal, size + os.fstat(journal.fileno()).st_size, folder / JOURNAL_FILE)
            with closing(sqlite3.connect(copy)) as index:
                index.execute("PRAGMA synchronous = OFF")
                index.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if copy.stat().st_size <= MAX_MEMORY_BYTES:
            return _restrict(_open_in_memory(copy.read_bytes()))
        return _restrict(sqlite3.connect(f"{copy.as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False))


def _open_in_memory(content: bytes) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    with _close_on_error(connection):
        connection.deserialize(content)
    return connection


def _restrict(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Limit what SQLite accepts from a database, forbid changes of it, and return the connection."""
    with _close_on_error(connection):
        for limit, value in SQLITE_LIMITS.items():
            connection.setlimit(limit, value)
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON"):
            connection.execute(f"PRAGMA {pragma}")
    return connection


@contextmanager
def _close_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _copy_file(file: FileIO, to: Path) -> None:
    file.seek(0)
    with to.open("xb") as copy:
        while part := file.read(CHUNK_BYTES):
            copy.write(part)


def _check_journal(file: FileIO, size: int, path: Path) -> None:
    """Raise DamagedFile for a journal that would let SQLite delete another file, or make the index very large.

    A journal may end with the name of another file, which SQLite would delete. It also states the former size of the database, to
    which SQLite would enlarge it.
    file: the journal, at `path`. size: sum of the sizes of the index and the journal in bytes, the largest size that is accepted.
    """
    file.seek(0)
    start = memoryview(bytearray(28))
    try:
        read_exactly(file, start)
    except ValueError:
        return
    file.seek(-8, os.SEEK_END)
    if file.read(8) == JOURNAL_MAGIC:
        raise DamagedFile(
            path, "names another file at its end, which SQLite would delete; no recorder writes that: copy the recording again"
        )
    pages, page = (int.from_bytes(start[at : at + 4], "big") for at in (16, 24))
    if pages * (page or 65536) > size:
        raise DamagedFile(
            path,
            f"states that the index had {pages} pages, more than the index and this journal can hold; copy the recording again",
        )
