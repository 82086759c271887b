"""Tests of the command `attacker`: custom networks, damaged recordings, missing true examples, LPIPS, routes and presets."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from changed_recordings import change_manifest
from command_line import join_lines, run_attacker
from federations import federate
from safetensors.torch import save_file
from typer.testing import Result

from attacker.attacks import AttackSpec, presets
from fedsim.commands.console import EXIT_FAILURES
from fedsim.models import building
from fedsim.recording import DataSpec, ModelSpec
from fedsim.recording.files import read_json_lines

CODE = """
from pathlib import Path
from torch import nn

Path(__file__).with_name("imported").touch()

def network(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.Linear(8, num_classes))
"""


@pytest.fixture(autouse=True)
def restore_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restoration of imported code and admitted networks after each test."""
    monkeypatch.setattr(building, "_ADMITTED", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("theirs", None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate(tmp_path_factory.mktemp("runs") / "photos", data="photos")


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a copy of a finished federation; its parent, the current folder, also holds a module theirs.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text(CODE)
    return Path(shutil.copytree(finished, tmp_path / "run"))


def replay(run: Path, *more: object) -> Result:
    return run_attacker("replay", run, "--attack", "cpl", "--set", "steps=2", "--device", "cpu", *more)


def rename_model(run: Path, name: str) -> None:
    """Replace the model's name in a recording by one that the project does not have."""
    change_manifest(run / "recording", model={"name": name, "arguments": {}})


@pytest.mark.parametrize("name", ["theirs:network", "their_network"])
def test_custom_network_is_imported_only_if_the_user_names_it(run: Path, name: str) -> None:
    rename_model(run, name)
    result = replay(run)
    assert result.exit_code == 2
    assert name in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert ("--model theirs:network" in result.stderr) == (":" in name)
    assert not (run.parent / "imported").exists()
    assert not (run / "reconstructions").exists()
    result = replay(run, "--model", "theirs:network", "--json")
    assert result.exit_code == 0, result.stderr
    assert [(part["done"], part["failed"]) for part in json.loads(result.stdout)] == [(2, {})] * 2
    assert (run.parent / "imported").exists()


@pytest.mark.parametrize(
    ("reference", "words"),
    [("theirs", "module:function"), ("theirs:absent", "theirs:absent"), ("absent_module:f", "absent_module:f")],
)
def test_missing_network_is_refused_in_one_line(run: Path, reference: str, words: str) -> None:
    rename_model(run, "their_network")
    result = replay(run, "--model", reference)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("file", "content"),
    [("manifest.json", b"{"), ("manifest.json", b"[]"), ("index.sqlite", b"no database"), ("index.sqlite", None)],
)
def test_damaged_recording_is_refused_in_one_line_with_the_file(run: Path, file: str, content: bytes | None) -> None:
    path = run / "recording" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    result = replay(run)
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_damaged_observation_fails_alone(run: Path) -> None:
    path = next(path for path in sorted((run / "recording" / "rounds").rglob("*.safetensors")) if path.stem != "global")
    path.write_bytes(path.read_bytes()[:-4])
    result = replay(run, "--no-null", "--json")
    assert result.exit_code == EXIT_FAILURES
    (part,) = json.loads(result.stdout)
    assert (part["done"], list(part["failed"])) == (1, [f"00001-{path.stem}"])
    assert str(path) in json.loads((Path(part["folder"]) / f"00001-{path.stem}.failed.json").read_text())["reason"]
    result = run_attacker("score", run)
    assert result.exit_code == EXIT_FAILURES
    assert "1 of 2 cases, including those of nulls, failed" in join_lines(result.stderr)
    assert run_attacker("score", run, "--allow-failures").exit_code == 0


def test_without_true_examples_score_advises_and_report_works(run: Path) -> None:
    assert replay(run).exit_code == 0
    shutil.rmtree(run / "truth")
    result = run_attacker("score", run)
    assert result.exit_code == 2
    assert "--truth FOLDER" in result.stderr
    assert f"attacker report {run}" in result.stderr
    assert not (run / "scores.jsonl").exists()
    for asked in (run, run / "recording"):
        result = run_attacker("report", asked)
        assert result.exit_code == 0
        assert result.stdout.strip() == str(run / "report.html")
        assert "nothing could be scored, because no truth was given" in (run / "report.html").read_text()


def test_scores_state_why_there_is_no_lpips(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    assert replay(run, "--no-null").exit_code == 0
    result = run_attacker("score", run, "--lpips-net", "vgg", "--json")
    assert result.exit_code == 0, result.stderr
    (summary,) = json.loads(result.stdout)
    assert (summary["lpips"], summary["lpips_net"]) == (None, None)
    assert summary["ssim_global"]["count"] == 2
    assert {row["lpips"] for row in read_json_lines(run / "scores.jsonl")} == {None}
    assert all("no weights of VGG-16" in row["lpips_reason"] for row in read_json_lines(run / "scores.jsonl"))
    result = run_attacker("score", run)
    assert "no weights of AlexNet" in result.stderr
    assert "--lpips-weights" in result.stderr


def test_a_wrong_file_of_weights_is_refused_before_anything_is_scored(run: Path, tmp_path: Path) -> None:
    assert replay(run, "--no-null").exit_code == 0
    save_file({"features.0.weight": torch.zeros(64, 3, 11, 11)}, tmp_path / "wrong.safetensors")
    for options, words in (
        (
            ["--lpips-weights", tmp_path / "wrong.safetensors"],
            "wrong.safetensors lacks the tensor features.0.bias; give a file of torchvision's weights of AlexNet",
        ),
        (["--lpips-weights", tmp_path / "absent"], "absent do not exist"),
        (["--lpips-net", "squeeze"], "unknown LPIPS net 'squeeze'"),
    ):
        result = run_attacker("score", run, *options)
        assert result.exit_code == 2
        assert words in result.stderr
    assert not (run / "scores.jsonl").exists()


def test_no_control_is_printed_for_an_attack_that_failed_in_every_case(run: Path) -> None:
    (run.parent / "theirs.py").write_text(
        "class Fails:\n"
        "    def __init__(self, device='cpu'):\n"
        "        self.device, self.needs = device, frozenset()\n"
        "    def null(self):\n"
        "        return self\n"
        "    def __call__(self, cases, *, rng, progress=None, memory=None):\n"
        "        raise RuntimeError('an error of theirs')\n"
    )
    assert replay(run, "--no-null").exit_code == 0
    assert "control:" in run_attacker("score", run).stdout
    shutil.rmtree(run / "reconstructions")
    assert run_attacker("replay", run, "--attack", "theirs:Fails", "--device", "cpu").exit_code == EXIT_FAILURES
    printed = run_attacker("score", run).stdout
    assert "no verdict: the attack failed in every case" in printed
    assert "control:" not in printed


def test_forced_route_is_shown_and_stored(run: Path) -> None:
    done = run_attacker("replay", run, "--attack", "exact", "--route", "layers", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "2 by layers" in done.output
    scored = run_attacker("score", run)
    assert scored.exit_code == 0, scored.output
    assert "2 by layers" in scored.stdout
    rows = [row for row in read_json_lines(run / "scores.jsonl") if not row["null"]]
    assert {(row["spec"], row["route"], row["success"]) for row in rows} == {("exact(route='layers')", "layers", True)}
    page = Path(run_attacker("report", run).stdout.strip()).read_text()
    assert "2 by layers" in page


def test_route_is_refused_for_attacks_without_routes(run: Path) -> None:
    refused = replay(run, "--route", "layers")
    assert refused.exit_code == 2
    assert "--route is an option of the attack exact, and cpl does not have it" in refused.output
    unknown = run_attacker("replay", run, "--attack", "exact", "--route", "magic")
    assert unknown.exit_code == 2
    assert "unknown route 'magic'. Known: auto, " in unknown.output


def test_workers_and_a_cluster_exclude_each_other(run: Path) -> None:
    result = replay(run, "--workers", "2", "--ray", "local")
    assert result.exit_code == 2
    assert "give only one of them" in result.stderr
    assert not (run / "reconstructions").exists()


def test_preset_is_stored_as_arguments_for_the_model(run: Path) -> None:
    result = run_attacker(
        "replay", run, "--attack", "cpl", "--preset", "tuned", "--set", "steps=1", "--set", "restarts=1", "--no-null"
    )
    assert result.exit_code == 0, result.output
    (facts,) = (run / "reconstructions").glob("cpl-*/attack.json")
    expected = presets.get_arguments("cpl", "tuned", ModelSpec(name="mlp"), DataSpec(shape=(3, 32, 32), num_classes=2))
    resolved = AttackSpec(name="cpl", arguments={**expected, "steps": 1, "restarts": 1})
    assert json.loads(facts.read_text())["spec"] == str(resolved)
    assert run_attacker("replay", run, "--attack", "cpl", "--preset", "best").exit_code == 2


def test_list_shows_presets() -> None:
    result = {one["name"]: one for one in json.loads(run_attacker("list", "--json").stdout)}
    assert result["inverting_gradients"]["presets"]["published"]["signed"] is True
    assert set(result["cpl"]["presets"]["tuned"]) == set(get_args(presets.NetworkFamily))
