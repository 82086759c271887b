"""Tests of the command `attacker audit` when no attack has an answer, and when the network cannot be built."""

import json
import re
import shutil
from pathlib import Path

import pytest
from federations import federate
from typer.testing import CliRunner

from attacker.audit import plan
from attacker.audit.attack_findings import NO_ANSWER
from attacker.cli import app
from attacker.commands import audit as command
from attacker.commands.audit import EXIT_ABOVE_GRADE
from attacker.replay.replay import Replay, ReplayResult
from attacker.scoring.growth import GROWTH_FILE
from fedsim.commands.console import EXIT_FAILURES
from fedsim.commands.maintenance import delete


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with findings of the checks, graded moderate, and without truth."""
    out = federate(tmp_path_factory.mktemp("runs") / "command", clients=4)
    shutil.rmtree(out / "truth")
    return out


def fail_always(replay: Replay) -> ReplayResult:
    return ReplayResult(replay.folder, failed={case.key: "ValueError: no" for case in replay.plan.cases})


@pytest.mark.parametrize(
    ("words", "status"), [([], 0), (["--fail-above", "low"], EXIT_ABOVE_GRADE), (["--fail-above", "serious"], EXIT_FAILURES)]
)
def test_fail_above_does_not_pass_without_answers(
    run: Path, words: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_replay_shown", fail_always)
    result = CliRunner().invoke(app, ["audit", str(run), "--budget", "1s", *words])
    assert result.exit_code == status, result.output
    assert f"moderate; {NO_ANSWER}" in result.stdout
    assert re.search(r"exact\(fallback='none'\) failed on (\d) of \1 updates?: ValueError: no", result.stdout)
    assert ("--fail-above cannot pass" in " ".join(result.stderr.split())) is (status == EXIT_FAILURES)


def test_a_run_is_deleted_with_what_audit_and_scores_wrote(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_replay_shown", fail_always)
    copied = shutil.copytree(run, tmp_path / "copied")
    assert CliRunner().invoke(app, ["audit", str(copied), "--budget", "1s"]).exit_code == 0
    assert (copied / "audit.html").exists()
    (copied / GROWTH_FILE).touch()
    delete(copied)
    assert not copied.exists()


def test_a_plan_that_fails_prints_no_finding(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*recording: object, **options: object) -> None:
        raise ValueError("the network cannot be built")

    assert "single example" in CliRunner().invoke(app, ["audit", str(run), "--plan"]).stdout
    monkeypatch.setattr(plan, "plan_attacks", fail)
    result = CliRunner().invoke(app, ["audit", str(run), "--plan"])
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize("words", [["--plan"], ["--budget", "1s"]])
def test_another_network_than_the_recorded_one_is_refused_before_the_attacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """As after --model with the wrong name: the recorded network has 16 hidden neurons, this one 7."""
    out = federate(tmp_path / "run", model={"name": "mlp", "hidden": [16]}, clients=1)
    (tmp_path / "their_other.py").write_text(
        "from torch import nn\ndef make(shape, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.Tanh(), nn.Linear(7, num_classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(command, "_replay_shown", lambda replay: pytest.fail("an attack was started"))
    path = out / "recording" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": {"name": "their_other:make"}}))
    result = CliRunner().invoke(app, ["audit", str(out), "--model", "their_other:make", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    stderr = " ".join(result.stderr.split())
    assert "does not fit the weights recorded in round 1" in stderr
    assert "give --model the network that was recorded, or restore the manifest" in stderr


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--budget", "ten", "write it as 90s, 10m or 2h"),
        ("--budget", "0m", "write it as 90s, 10m or 2h"),
        ("--fail-above", "severe", "Known: none, low, moderate, serious"),
        ("--out", "audit.pdf", "unknown ending '.pdf'"),
        ("--out", "audit.pdf", "Write the audit to a file ending in .html"),
        ("--what-if", "klip(1)", "Did you mean 'clip'?"),
        ("--what-if", "clip(1", "close every bracket"),
        ("--what-if", "recommend", "or write recommended"),
    ],
)
def test_invalid_values_are_refused_with_advice_before_the_attacks(
    run: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str, words: str
) -> None:
    monkeypatch.setattr(command, "_replay_shown", lambda replay: pytest.fail("an attack was started"))
    result = CliRunner().invoke(app, ["audit", str(run), "--budget", "1s", option, value])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_folders_of_further_files_are_created(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "audit.json"
    result = CliRunner().invoke(app, ["audit", str(run), "--budget", "1s", "--out", str(file)])
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["grade"]


@pytest.mark.parametrize("words", [["--plan"], ["--budget", "1s"]])
def test_damaged_updates_are_named(run: Path, tmp_path: Path, words: list[str]) -> None:
    out = tmp_path / "damaged"
    shutil.copytree(run, out)
    victim = sorted((out / "recording" / "rounds" / "00001").glob("[0-9a-f]*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-5])
    assert "damaged" not in CliRunner().invoke(app, ["audit", str(run), *words]).stdout
    result = CliRunner().invoke(app, ["audit", str(out), *words])
    assert result.exit_code == 0, result.output
    assert "1 damaged update is left out of the checks" in result.stdout
    assert victim.name in result.stdout


@pytest.mark.parametrize("words", [["--what-if", "clip(1)"], ["--fail-above", "low"], ["--out", "audit.json"], ["--json"]])
def test_options_without_effect_on_a_plan_are_refused(run: Path, words: list[str]) -> None:
    result = CliRunner().invoke(app, ["audit", str(run), "--plan", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{words[0]} has no effect with --plan" in " ".join(result.stderr.split())


@pytest.mark.parametrize("words", [["--plan"], ["--budget", "1s"]])
def test_a_folder_without_truth_is_refused_before_the_attacks(run: Path, words: list[str]) -> None:
    result = CliRunner().invoke(app, ["audit", str(run), "--truth", "nowhere", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nowhere holds no truth" in " ".join(result.stderr.split())
