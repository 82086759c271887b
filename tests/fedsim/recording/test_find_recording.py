"""Tests of finding a run and its recording from either folder, in the same way in all commands."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from attacker.cli import app as attacker
from fedsim.cli import app as fedsim
from fedsim.recording import find_recording, find_run


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
    run = str(tmp_path / "run")
    asked = [(attacker, ["replay", run, "--attack", "cpl"]), (attacker, ["audit", run]), (attacker, ["report", run])]
    asked += [(fedsim, ["show", run]), (fedsim, ["verify", run])]
    if made.endswith("recording"):
        asked.append((attacker, ["score", run]))
    messages = set()
    for app, words in asked:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        messages.add(" ".join(result.stderr.split()))
    assert len(messages) == 1
    assert "is neither a run nor a recording: it has no manifest.json and no recording/manifest.json" in messages.pop()
