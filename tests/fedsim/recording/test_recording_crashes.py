"""Tests of writers that crash: a round is recorded completely or not at all."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from power_cut import CutBeforeCall, PowerCut

from fedsim.recording import Manifest, Recorder, Recording, Reply
from fedsim.recording.codec import encode


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("at", range(1, 13))
def test_a_round_is_recorded_completely_or_not_at_all(
    recorded: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The writer stops before a flush or renaming of a file; three files take at least six of these."""
    recorder = Recorder(recorded, manifest)
    before = [row.key for row in Recording(recorded).read_rows()]

    def round_four() -> None:
        recorder.record_sent(4, {"w": torch.zeros(3)})
        for client in ("anna", "bert"):
            recorder.record_reply(4, Reply(client=client, node="1", payload=encode({"w": torch.ones(3)})))
        recorder.commit(4, ("anna", "bert"))

    with monkeypatch.context() as patched:
        cut = CutBeforeCall(patched, at)
        cut.watch(os, "fsync", "replace")
        try:
            round_four()
            assert 6 <= cut.done < at
        except PowerCut:
            assert [row.key for row in Recording(recorded).read_rows()] == before
            assert len(list(Recording(recorded).read_observations())) == 4
            recorder.roll_back(3)
            monkeypatch.undo()
            round_four()
    assert [o.key for o in Recording(recorded).read_observations(rounds={4})] == ["00004-anna", "00004-bert"]
    assert not list(recorded.rglob("*.partial"))


def test_no_row_is_visible_before_its_round_is_committed(tmp_path: Path, manifest: Manifest) -> None:
    recorder = Recorder(tmp_path / "r", manifest)
    recorder.record_sent(1, {"w": torch.ones(1)})
    for number in range(3):
        recorder.record_reply(1, Reply(client=f"c{number}", node="1", payload=encode({"w": torch.ones(1)})))
        assert Recording(tmp_path / "r").read_rows() == []
        assert Recording(tmp_path / "r").list_rounds() == []
    recorder.commit(1, ["c0", "c1", "c2"])
    assert len(Recording(tmp_path / "r").read_rows()) == 3


def test_rolling_back_removes_rounds_and_their_files(recorded: Path, manifest: Manifest) -> None:
    Recorder(recorded, manifest).roll_back(1)
    assert [row.key for row in Recording(recorded).read_rows()] == ["00001-anna", "00001-bert"]
    assert Recording(recorded).list_rounds() == [1]
    assert [path.name for path in (recorded / "rounds").iterdir()] == ["00001"]


KILLED = """
import os, sqlite3, sys
index = sqlite3.connect(sys.argv[1])
index.execute("PRAGMA cache_size = 1")  # changed pages are written before the commit, and their old content to the journal
index.execute("UPDATE observations SET num_examples = 99")
row = "INSERT INTO observations SELECT round + ?, client, node, 1, 'late', ?, 1, NULL, NULL, NULL, 0, '{}', 0.0 FROM observations"
for number in range(5):
    index.execute(row + " WHERE round = 1", (1000 * (number + 1), "x" * 3000))
index.execute("UPDATE rounds SET sha256 = 'spoilt'")
os._exit(9)
"""


@pytest.mark.parametrize("sealed", [False, True])
def test_an_index_whose_writer_was_killed_in_a_commit_is_read_as_before_it(recorded: Path, sealed: bool) -> None:
    before = Recording(recorded).read_rows()
    index_before = contents(recorded)[recorded / "index.sqlite"]
    assert subprocess.run([sys.executable, "-c", KILLED, recorded / "index.sqlite"], check=False).returncode == 9
    spoilt = contents(recorded)
    assert spoilt[recorded / "index.sqlite"] != index_before
    assert recorded / "index.sqlite-journal" in spoilt
    if sealed:
        recorded.chmod(0o500)
    try:
        recording = Recording(recorded)
        assert recording.read_rows() == before
        assert [o.num_examples for o in recording.read_observations()] == [
            6
        ] * 4  # the prescribed steps use 6 of the 7 reported examples
        assert contents(recorded) == spoilt  # a reader does not undo the commit in the file
    finally:
        recorded.chmod(0o700)
    with sqlite3.connect(recorded / "index.sqlite") as index:  # a writer does
        assert index.execute("SELECT count(*) FROM observations").fetchone() == (6,)
    index.close()
    assert Recording(recorded).read_rows() == before


@pytest.mark.parametrize("at", range(1, 4))
def test_an_index_is_made_completely_or_not_at_all(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The writer stops before SQLite writes, before the flush or before the renaming; a second one then makes the index."""
    manifest.write(tmp_path / "manifest.json")
    with monkeypatch.context() as patched:
        cut = CutBeforeCall(patched, at)
        cut.watch(sqlite3, "connect")
        cut.watch(os, "fsync", "replace")
        with pytest.raises(PowerCut):
            Recorder(tmp_path, manifest)
    assert not (tmp_path / "index.sqlite").exists()
    Recorder(tmp_path, manifest)
    assert Recording(tmp_path).read_rows() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.sqlite", "manifest.json"]
