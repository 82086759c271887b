"""Tests of attacks that use images of the user's: a replay without their file is a wrong usage, not a failure of each case."""

from pathlib import Path

import pytest
from command_line import join_lines, run_attacker
from federations import federate


@pytest.mark.parametrize(("attack", "argument"), [("membership", "candidates"), ("learning_to_invert", "images")])
def test_a_file_that_is_not_named_or_missing_is_reported_once(attack: str, argument: str, tmp_path: Path) -> None:
    run = federate(tmp_path / "run")
    for given in ([], ["--set", f"{argument}={tmp_path / 'nowhere.npz'}"]):
        found = run_attacker("replay", run, "--attack", attack, *given)
        assert found.exit_code == 2
        assert found.stderr.count("error") == 1
        assert f"--set {argument}=FILE.npz" in join_lines(found.stderr)
        assert not (run / "reconstructions").exists()


def test_a_missing_or_cut_off_file_of_a_recording_is_named_with_what_to_do(tmp_path: Path) -> None:
    run = federate(tmp_path / "run")
    weights, manifest = run / "recording" / "rounds" / "00001" / "global.safetensors", run / "recording" / "manifest.json"
    weights.unlink()
    found = run_attacker("replay", run, "--attack", "exact", "--no-null")
    assert "global.safetensors: is missing; copy the run again" in "".join(found.stderr.split("\n"))
    manifest.write_text(manifest.read_text()[:200])
    found = run_attacker("replay", run, "--attack", "exact")
    assert found.exit_code == 2
    assert "manifest.json: is cut off or no valid JSON" in join_lines(found.stderr)
    assert "copy the run again" in join_lines(found.stderr)
