"""Tests of malicious indexes: SQLite runs no code from them, deletes no files for them, and all values are checked."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from changed_recordings import change_index, check_damage
from damage import CUT_OFF

from fedsim.recording import DamagedFile, Recording, index_database
from fedsim.recording import index as index_module


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW more AS SELECT * FROM rounds",
        "ALTER TABLE observations RENAME TO o; CREATE VIEW observations AS SELECT * FROM o",
        "CREATE TRIGGER boom AFTER INSERT ON rounds BEGIN DELETE FROM observations; END",
        "CREATE TABLE notes (x)",
        "ALTER TABLE rounds ADD COLUMN truth TEXT",
        "CREATE INDEX cunning ON observations (abs(round))",
        "DROP INDEX observations_by_client",
        "DROP TABLE rounds",
        "CREATE VIRTUAL TABLE words USING fts5(x)",
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'CREATE TABLE rounds (round)' WHERE name = 'rounds'",
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'nonsense'",
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET rootpage = 99999",
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET name = CAST(x'CE6162' AS TEXT), sql = 'CREATE nonsense'",
    ],
)
def test_an_index_with_anything_but_our_tables_is_refused(recorded: Path, statement: str) -> None:
    with closing(sqlite3.connect(recorded / "index.sqlite")) as index, index:
        index.execute("PRAGMA synchronous = OFF")
        index.executescript(statement)
    check_damage(recorded, "index.sqlite")


def test_an_index_in_another_journal_mode_is_refused_and_left_alone(recorded: Path) -> None:
    """SQLite would write files beside an index in write-ahead mode even to read it."""
    with closing(sqlite3.connect(recorded / "index.sqlite")) as index:
        index.execute("PRAGMA journal_mode = WAL")
    before = sorted(path.name for path in recorded.iterdir())
    check_damage(recorded, "index.sqlite", "write-ahead mode")
    assert sorted(path.name for path in recorded.iterdir()) == before


@pytest.mark.parametrize("name", ["index.sqlite-wal", "index.sqlite-shm"])
def test_an_index_with_a_write_ahead_file_is_refused(recorded: Path, name: str) -> None:
    (recorded / name).write_bytes(b"")
    check_damage(recorded, "index.sqlite", "write-ahead mode")
    assert (recorded / name).exists()


VALUES: list[tuple[str, str, Any]] = [
    *(("observations", "round", value) for value in (-1, 0, 1.5, "x", b"1", 2**60)),
    *(("observations", "client", value) for value in ("../a", "", "a\n", "global", "a" * 65, 5.0, b"anna", "\x1b[2J")),
    *(("observations", "node", value) for value in ("a" * 65, "\x1b[2J", b"1")),
    *(("observations", "attempt", value) for value in (0, -1, 1.5, "x")),
    *(("observations", "status", value) for value in ("", "done", b"complete")),
    *(("observations", "reason", value) for value in (b"x",)),
    *(("observations", "num_examples", value) for value in (-1, 1.5, "many", 2**62, float("inf"), b"1")),
    *(("observations", "file", value) for value in (None, b"x")),
    *(("observations", "sha256", value) for value in (None, "", "0" * 63, "0" * 63 + "G", "A" * 64, b"0" * 64)),
    *(("observations", "codec", value) for value in (None, "", "zip", b"dense")),
    *(("observations", "bytes", value) for value in (-1, 1.5, "x", 2**62)),
    *(("observations", "metrics", value) for value in ("", "[]", "3", "{", "null", '{"a": "b"}', '{"a": [1]}', '{"a": true}')),
    *(("observations", "metrics", value) for value in ("[" * 100_000, '{"a":' * 100_000, b"{}", '{"a": null}')),
    *(("observations", "received_at", value) for value in (float("inf"), "x", b"x")),
    *(("rounds", "round", value) for value in (0, -1, 2**62)),
    *(("rounds", "attempt", value) for value in (0, "x")),
    *(("rounds", "sha256", value) for value in ("", "0" * 63, b"0" * 64)),
    *(("rounds", "cohort", value) for value in ("", "{}", "[1]", '["../a"]', '[["anna"]]', "[" * 100_000, b"[]", "3")),
]


@pytest.mark.parametrize(("table", "column", "value"), VALUES)
def test_a_value_that_no_recorder_writes_is_refused_and_its_row_named(
    recorded: Path, table: str, column: str, value: Any
) -> None:
    with closing(sqlite3.connect(recorded / "index.sqlite")) as index, index:
        index.execute("PRAGMA synchronous = OFF")
        index.execute("PRAGMA ignore_check_constraints = ON")
        where = "AND client = 'anna'" if table == "observations" else ""
        index.execute(f"UPDATE {table} SET {column} = ? WHERE round = 1 {where}", (value,))
    error = check_damage(recorded, "index.sqlite")
    missing = table == "rounds" and column == "round"  # the row of the round is not found
    assert "no global weights of round 1" in error.reason if missing else f"is not a valid value of {column}" in error.reason
    errors: list[DamagedFile] = []
    left = {o.key for o in Recording(recorded).read_observations(on_damage=errors.append)}
    assert {"00002-anna", "00002-bert"} <= left
    assert ("00001-bert" in left) is (table == "observations")
    assert errors


@pytest.mark.parametrize("value", ["-1", "1.5", "'x'", "9e999", "9223372036854775807"])
def test_invalid_counts_are_refused(recorded: Path, value: str) -> None:
    change_index(recorded, f"UPDATE observations SET bytes = {value}")
    with pytest.raises(DamagedFile, match=r"index\.sqlite"):
        Recording(recorded).count_replies()


def test_invalid_names_of_clients_are_refused(recorded: Path) -> None:
    change_index(recorded, "UPDATE observations SET client = '../' || client")
    with pytest.raises(DamagedFile, match="is not a valid name of a client"):
        Recording(recorded).list_clients()


def test_a_value_of_many_megabytes_is_not_read(recorded: Path) -> None:
    change_index(recorded, "UPDATE observations SET reason = zeroblob(20000000) WHERE round = 1 AND client = 'anna'")
    check_damage(recorded, "index.sqlite", "too big")


def test_a_query_that_does_not_end_is_stopped(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index whose pages form a cycle could make a query endless."""
    monkeypatch.setattr(index_module, "PROGRESS_INSTRUCTIONS", 1000)
    endless = "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"
    with pytest.raises(DamagedFile, match="interrupted"):
        index_module.query_index(recorded, endless)


# --- journals ---


@pytest.fixture
def interrupted(recorded: Path) -> Path:
    """A recording whose writer was killed during a commit, so that a journal is left."""
    subprocess.run([sys.executable, "-c", CUT_OFF, recorded / "index.sqlite"], check=False)
    assert len(Recording(recorded).read_rows()) == 6
    return recorded


def super_journal(name: str) -> bytes:
    """Return the bytes with which a journal names another file, which SQLite deletes after undoing the commit."""
    text = name.encode()
    return (
        (2**30 // 4096 + 1).to_bytes(4, "big")
        + text
        + len(text).to_bytes(4, "big")
        + sum(text).to_bytes(4, "big")
        + index_database.JOURNAL_MAGIC
    )


def test_a_journal_cannot_have_other_files_deleted(interrupted: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    journal = interrupted / "index.sqlite-journal"
    journal.write_bytes(journal.read_bytes() + super_journal(str(victim)))
    check_damage(interrupted, journal.name, "names another file at its end")
    assert victim.read_bytes() == b"precious"


def test_without_the_guard_sqlite_deletes_the_file(interrupted: Path, tmp_path: Path) -> None:
    """SQLite alone deletes the named file. If this test fails, SQLite has changed and the guard is no longer needed."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    journal = interrupted / "index.sqlite-journal"
    journal.write_bytes(journal.read_bytes() + super_journal(str(victim)))
    with closing(sqlite3.connect(interrupted / "index.sqlite")) as index:
        index.execute("SELECT count(*) FROM rounds").fetchone()
    assert not victim.exists()


def test_a_journal_cannot_make_an_index_of_terabytes(interrupted: Path) -> None:
    journal = interrupted / "index.sqlite-journal"
    content = bytearray(journal.read_bytes())
    assert content[:8] == index_database.JOURNAL_MAGIC
    content[16:20] = (2**31).to_bytes(4, "big")
    journal.write_bytes(content)
    check_damage(interrupted, journal.name, "states that the index had 2147483648 pages")


def test_a_journal_that_is_a_link_is_not_followed(interrupted: Path) -> None:
    journal = interrupted / "index.sqlite-journal"
    journal.rename(interrupted.parent / "outside")
    journal.symlink_to(interrupted.parent / "outside")
    check_damage(interrupted, journal.name, "not a regular file")
