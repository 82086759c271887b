"""Tests of finding a run from either of its folders, and of the check of a run's folder for links and devices.

Links and devices are refused also if they appear after an earlier check.
"""

import os
import time
from pathlib import Path

import pytest
from command_line import join_lines, run_attacker, run_fedsim

from fedsim.recording import find_recording, find_run, run_check
from fedsim.recording.run_check import find_foreign


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for number in range(3):
        folder = tmp_path / "run" / "reconstructions" / f"cpl-{number}"
        folder.mkdir(parents=True)
        (folder / "attack.json").write_text("{}")
    (tmp_path / "run" / "recording").mkdir()
    time.sleep(0.05)  # modification times are rounded to some milliseconds
    return tmp_path / "run"


@pytest.mark.parametrize("age", [0.0, run_check.SETTLED_SECONDS])
def test_a_link_that_is_planted_after_a_check_is_found(age: float, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_check, "SETTLED_SECONDS", age)
    for _ in range(2):
        assert list(find_foreign(run)) == []
    path = run / "reconstructions" / "cpl-1" / "scores.jsonl"
    path.symlink_to(run / "elsewhere")
    assert [error.path for error in find_foreign(run)] == [path]
    path.unlink()
    assert list(find_foreign(run)) == []


def test_a_folder_with_a_link_is_reported_by_every_check(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_check, "SETTLED_SECONDS", 0.0)
    (run / "reconstructions" / "cpl-1" / "x").symlink_to("/dev/null")
    assert [len(list(find_foreign(run))) for _ in range(3)] == [1, 1, 1]


def test_folders_that_did_not_change_are_not_listed_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service checks the whole run before every job, and earlier jobs have added many folders."""
    monkeypatch.setattr(run_check, "SETTLED_SECONDS", -1.0)
    listed: list[object] = []
    list_folder = os.listdir
    monkeypatch.setattr(os, "listdir", lambda at: listed.append(at) or list_folder(at))
    assert list(find_foreign(run)) == []
    first = len(listed)
    assert list(find_foreign(run)) == []
    assert (first, len(listed) - first) == (
        6,
        2,
    )  # run, recording, reconstructions and its 3 folders; then run and reconstructions


@pytest.mark.parametrize("given", ["run", "run/recording"])
def test_both_are_found_from_either(tmp_path: Path, given: str) -> None:
    recording = tmp_path / "run" / "recording"
    recording.mkdir(parents=True)
    (recording / "manifest.json").touch()
    assert find_recording(tmp_path / given) == recording
    assert find_run(tmp_path / given) == tmp_path / "run"


def test_the_run_of_the_current_folder_is_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recording").mkdir()
    (tmp_path / "recording" / "manifest.json").touch()
    monkeypatch.chdir(tmp_path / "recording")
    assert find_run(Path()).samefile(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert (find_run(Path()), find_recording(Path())) == (Path(), Path("recording"))


@pytest.mark.parametrize("made", ["run", "run/recording"])
def test_a_folder_without_a_manifest_is_refused_by_all_commands_alike(tmp_path: Path, made: str) -> None:
    (tmp_path / made).mkdir(parents=True)
    run = tmp_path / "run"
    asked = [(run_attacker, ["replay", run, "--attack", "cpl"]), (run_attacker, ["audit", run]), (run_attacker, ["report", run])]
    asked += [(run_fedsim, ["show", run]), (run_fedsim, ["verify", run])]
    if made.endswith("recording"):
        asked.append((run_attacker, ["score", run]))
    messages = set()
    for program, words in asked:
        result = program(*words)
        assert result.exit_code == 2
        messages.add(join_lines(result.stderr))
    assert len(messages) == 1
    assert "is neither a run nor a recording: it has no manifest.json and no recording/manifest.json" in messages.pop()
