"""SQLite file of the queue of jobs: its tables, and transactions that are written completely or not at all."""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 2
LOCK_SECONDS = 30.0
"""Seconds that one process waits for another one's transaction."""
SCHEMA = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    recording TEXT NOT NULL,
    spec TEXT NOT NULL,
    priority INTEGER NOT NULL,
    origin TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('queued', 'running', 'done', 'failed', 'cancelled', 'set_aside')),
    attempts INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0,
    owner TEXT,
    asked_to_end INTEGER NOT NULL DEFAULT 0,
    created TEXT NOT NULL,
    started TEXT,
    ended TEXT,
    share REAL NOT NULL DEFAULT 0,
    words TEXT NOT NULL DEFAULT '',
    cpu REAL NOT NULL DEFAULT 0,
    error TEXT,
    result TEXT,
    version INTEGER NOT NULL
);
CREATE INDEX waiting ON jobs (priority DESC, number) WHERE state = 'queued';
CREATE INDEX by_state ON jobs (state, number);
CREATE INDEX by_recording ON jobs (recording, number);
CREATE INDEX by_version ON jobs (version);
CREATE TABLE publications (job TEXT PRIMARY KEY REFERENCES jobs (id), attempt INTEGER NOT NULL, published TEXT NOT NULL);
CREATE TABLE taken (
    rule TEXT NOT NULL,
    recording TEXT NOT NULL,
    identity TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    job TEXT REFERENCES jobs (id),
    created TEXT NOT NULL,
    PRIMARY KEY (rule, recording, identity, round, attempt)
) WITHOUT ROWID;
CREATE TABLE changes (version INTEGER NOT NULL);
INSERT INTO changes VALUES (0);
"""


class Store:
    """One SQLite file, shared by all threads of this process and by other processes.

    A write waits for other writes to end, for writes of another process at most `LOCK_SECONDS`, and is on disk when it returns.
    Reads do not wait for writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._listeners: tuple[Callable[[], object], ...] = ()
        with self._name_damage():
            self._writer, self._reader = self._connect(), self._connect()
        try:
            with self._name_damage():
                ((problem,),) = self.read("PRAGMA quick_check(1)")
            if problem != "ok":
                raise self._make_damage_error(problem)
            self._make_tables()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _name_damage(self) -> Iterator[None]:
        """Return a context in which errors of a damaged file become a ValueError that names the file and says what to do."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise
            raise self._make_damage_error(str(error)) from None

    def _make_damage_error(self, problem: str) -> ValueError:
        advice = "delete it together with its files -wal and -shm; the list of jobs is lost, and results of attacks are kept"
        return ValueError(f"{self.path} is damaged ({' '.join(problem.split())}); {advice}")

    def _make_tables(self) -> None:
        """Make the tables of a new file. Raises ValueError for a file of another version."""
        with self.open_transaction() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, SCHEMA_VERSION):
                raise ValueError(
                    f"{self.path} has schema version {version}, and this program supports {SCHEMA_VERSION}; install the "
                    "version of the program that wrote the file"
                )
            if version == SCHEMA_VERSION:
                return
            for statement in SCHEMA.split(";\n"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    @contextmanager
    def open_transaction(self) -> Iterator[sqlite3.Connection]:
        """Return a context that yields the connection for writes; if its `with` block raises an exception, nothing is written."""
        with self._write_lock:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # SQLite rolls back by itself after some errors, such as a full disk
                    self._writer.execute("ROLLBACK")
                raise
        for listener in self._listeners:
            listener()

    def add_listener(self, listener: Callable[[], object]) -> None:
        """Register a fast callback, which is called in the thread of each transaction that this process has written."""
        self._listeners += (listener,)

    def read(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Return all rows of a query, from one consistent state of the file. values: for the ? of the query."""
        with self._read_lock:
            return self._reader.execute(query, values).fetchall()

    def close(self) -> None:
        with self._write_lock, self._read_lock:
            self._writer.close()
            self._reader.close()
