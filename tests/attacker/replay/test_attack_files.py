"""Tests of attacks that use images of the user's: a replay without their file is a wrong usage, not a failure of each case."""

from pathlib import Path

import pytest
from federations import federate
from typer.testing import CliRunner

from attacker.cli import app


@pytest.mark.parametrize(("attack", "argument"), [("membership", "candidates"), ("learning_to_invert", "images")])
def test_a_file_that_is_not_named_or_missing_is_reported_once(attack: str, argument: str, tmp_path: Path) -> None:
    run = federate(tmp_path / "run")
    for given in ([], ["--set", f"{argument}={tmp_path / 'nowhere.npz'}"]):
        found = CliRunner().invoke(app, ["replay", str(run), "--attack", attack, *given])
        assert found.exit_code == 2
        assert found.stderr.count("error") == 1
        assert f"--set {argument}=FILE.npz" in " ".join(found.stderr.split())
        assert not (run / "reconstructions").exists()


def test_a_missing_or_cut_off_file_of_a_recording_is_named_with_what_to_do(tmp_path: Path) -> None:
    run = federate(tmp_path / "run")
    weights, manifest = run / "recording" / "rounds" / "00001" / "global.safetensors", run / "recording" / "manifest.json"
    weights.unlink()
    found = CliRunner().invoke(app, ["replay", str(run), "--attack", "exact", "--no-null"])
    assert "global.safetensors: is missing; copy the run again" in "".join(found.stderr.split("\n"))
    manifest.write_text(manifest.read_text()[:200])
    found = CliRunner().invoke(app, ["replay", str(run), "--attack", "exact"])
    assert found.exit_code == 2
    assert "manifest.json: is cut off or no valid JSON" in " ".join(found.stderr.split())
    assert "copy the run again" in " ".join(found.stderr.split())
