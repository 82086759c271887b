"""What the command line of the attacker adds to what it calls: somebody else's model, truth that is absent, LPIPS."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from attacker.attacks import AttackSpec, presets
from attacker.cli import app
from fedsim.commands.console import EXIT_FAILURES
from fedsim.config.experiment import validate
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.models import building
from fedsim.recording import DataSpec, ModelSpec
from fedsim.recording.files import read_json_lines

EXPERIMENT = {
    "rounds": 1,
    "model": {"name": "mlp", "hidden": [8]},
    "data": "photos",
    "clients": {"count": 2},
    "training": {"learning_rate": 0.1, "batch_size": 1, "steps": 1},
}
CODE = """
from pathlib import Path
from torch import nn

Path(__file__).with_name("imported").touch()

def network(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.Linear(8, num_classes))
"""


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads, imported code and what was admitted are put back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(building, "_ADMITTED", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    torch.set_num_threads(threads)
    sys.modules.pop("theirs", None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "photos"
    engine.run(FederationRun(experiment=validate(EXPERIMENT, source="test"), out=folder, client_seed=1), engine="local")
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a finished federation, beside a file of code; the current folder is the one that holds both."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text(CODE)
    return Path(shutil.copytree(finished, tmp_path / "run"))


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def replay(run: Path, *more: object) -> Result:
    return call("replay", run, "--attack", "cpl", "--set", "steps=2", "--device", "cpu", *more)


def rename_model(run: Path, name: str) -> None:
    """Make the recording one of a model that the project does not have."""
    path = run / "recording" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["model"] = {"name": name, "arguments": {}}
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["theirs:network", "their_network"])
def test_the_network_of_another_federation_is_imported_only_where_the_user_names_it(run: Path, name: str) -> None:
    rename_model(run, name)
    told = replay(run)
    assert told.exit_code == 2
    assert name in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1
    assert ("--model theirs:network" in told.stderr) == (":" in name)
    assert not (run.parent / "imported").exists()
    assert not (run / "reconstructions").exists()
    told = replay(run, "--model", "theirs:network", "--json")
    assert told.exit_code == 0, told.stderr
    assert [(part["done"], part["failed"]) for part in json.loads(told.stdout)] == [(2, {})] * 2
    assert (run.parent / "imported").exists()


@pytest.mark.parametrize(
    ("reference", "said"),
    [("theirs", "module:function"), ("theirs:absent", "theirs:absent"), ("absent_module:f", "absent_module:f")],
)
def test_a_network_that_cannot_be_had_is_refused_in_a_line(run: Path, reference: str, said: str) -> None:
    rename_model(run, "their_network")
    told = replay(run, "--model", reference)
    assert told.exit_code == 2
    assert said in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("file", "content"),
    [("manifest.json", b"{"), ("manifest.json", b"[]"), ("index.sqlite", b"no database"), ("index.sqlite", None)],
)
def test_a_damaged_recording_is_refused_in_a_line_that_names_the_file(run: Path, file: str, content: bytes | None) -> None:
    path = run / "recording" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    told = replay(run)
    assert told.exit_code == 2
    assert str(path) in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1


def test_a_damaged_observation_is_named_and_the_others_are_attacked(run: Path) -> None:
    path = next(path for path in sorted((run / "recording" / "rounds").rglob("*.safetensors")) if path.stem != "global")
    path.write_bytes(path.read_bytes()[:-4])
    told = replay(run, "--no-null", "--json")
    assert told.exit_code == EXIT_FAILURES
    (part,) = json.loads(told.stdout)
    assert (part["done"], list(part["failed"])) == (1, [f"00001-{path.stem}"])
    assert str(path) in json.loads((Path(part["folder"]) / f"00001-{path.stem}.failed.json").read_text())["reason"]
    told = call("score", run)
    assert told.exit_code == EXIT_FAILURES
    assert "1 of 2 cases, including those of nulls, failed" in " ".join(told.stderr.split())
    assert call("score", run, "--allow-failures").exit_code == 0


def test_without_truth_scoring_says_what_to_give_and_the_report_shows_what_there_is(run: Path) -> None:
    assert replay(run).exit_code == 0
    shutil.rmtree(run / "truth")
    told = call("score", run)
    assert told.exit_code == 2
    assert "--truth FOLDER" in told.stderr
    assert f"attacker report {run}" in told.stderr
    assert not (run / "scores.jsonl").exists()
    for asked in (run, run / "recording"):
        told = call("report", asked)
        assert told.exit_code == 0
        assert told.stdout.strip() == str(run / "report.html")
        assert "nothing could be scored, because no truth was given" in (run / "report.html").read_text()


def test_scores_say_why_there_is_no_lpips(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    assert replay(run, "--no-null").exit_code == 0
    told = call("score", run, "--lpips-net", "vgg", "--json")
    assert told.exit_code == 0, told.stderr
    (summary,) = json.loads(told.stdout)
    assert (summary["lpips"], summary["lpips_net"]) == (None, None)
    assert summary["ssim_global"]["count"] == 2
    assert {row["lpips"] for row in read_json_lines(run / "scores.jsonl")} == {None}
    assert all("no weights of VGG-16" in row["lpips_reason"] for row in read_json_lines(run / "scores.jsonl"))
    told = call("score", run)
    assert "no weights of AlexNet" in told.stderr
    assert "--lpips-weights" in told.stderr


def test_a_wrong_file_of_weights_is_refused_before_anything_is_scored(run: Path, tmp_path: Path) -> None:
    assert replay(run, "--no-null").exit_code == 0
    save_file({"features.0.weight": torch.zeros(64, 3, 11, 11)}, tmp_path / "wrong.safetensors")
    for options, said in (
        (["--lpips-weights", tmp_path / "wrong.safetensors"], "wrong.safetensors: not the weights of AlexNet"),
        (["--lpips-weights", tmp_path / "absent"], "absent do not exist"),
        (["--lpips-net", "squeeze"], "unknown LPIPS net 'squeeze'"),
    ):
        told = call("score", run, *options)
        assert told.exit_code == 2
        assert said in told.stderr
    assert not (run / "scores.jsonl").exists()


def test_a_route_is_forced_shown_and_written_into_every_row(run: Path) -> None:
    done = call("replay", run, "--attack", "exact", "--route", "layers", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "2 by layers" in done.output
    scored = call("score", run)
    assert scored.exit_code == 0, scored.output
    assert "2 by layers" in scored.stdout
    rows = [row for row in read_json_lines(run / "scores.jsonl") if not row["null"]]
    assert {(row["spec"], row["route"], row["success"]) for row in rows} == {("exact(route='layers')", "layers", True)}
    page = Path(call("report", run).stdout.strip()).read_text()
    assert "2 by layers" in page


def test_a_route_for_an_attack_without_any_is_refused(run: Path) -> None:
    refused = replay(run, "--route", "layers")
    assert refused.exit_code == 2
    assert "--route is an option of the attack exact; cpl has no routes" in refused.output
    unknown = call("replay", run, "--attack", "exact", "--route", "magic")
    assert unknown.exit_code == 2
    assert "unknown route 'magic'. Known: auto, " in unknown.output


def test_what_is_not_in_the_recording_is_refused_with_what_is(run: Path) -> None:
    names = ", ".join(sorted(path.stem for path in (run / "recording" / "rounds" / "00001").glob("*") if path.stem != "global"))
    told = replay(run, "--client", "nobody")
    assert told.exit_code == 2
    assert f"holds no client 'nobody'. Its clients: {names}" in " ".join(told.stderr.split())
    told = replay(run, "--rounds", "3")
    assert told.exit_code == 2
    assert "holds no round 3. Its rounds: 1" in " ".join(told.stderr.split())


def test_workers_and_a_cluster_exclude_each_other(run: Path) -> None:
    told = replay(run, "--workers", "2", "--ray", "local")
    assert told.exit_code == 2
    assert "give only one of them" in told.stderr
    assert not (run / "reconstructions").exists()


def test_a_preset_is_resolved_by_the_model_and_written_out(run: Path) -> None:
    told = CliRunner().invoke(
        app, ["replay", str(run), "--attack", "cpl", "--preset", "tuned", "--set", "steps=1", "--set", "restarts=1", "--no-null"]
    )
    assert told.exit_code == 0, told.output
    (facts,) = (run / "reconstructions").glob("cpl-*/attack.json")
    expected = presets.get_arguments("cpl", "tuned", ModelSpec(name="mlp"), DataSpec(shape=(3, 32, 32), num_classes=2))
    resolved = AttackSpec(name="cpl", arguments={**expected, "steps": 1, "restarts": 1})
    assert json.loads(facts.read_text())["spec"] == str(resolved)
    assert CliRunner().invoke(app, ["replay", str(run), "--attack", "cpl", "--preset", "best"]).exit_code == 2


def test_the_list_shows_presets() -> None:
    told = {one["name"]: one for one in json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)}
    assert told["inverting_gradients"]["presets"]["published"]["signed"] is True
    assert set(told["cpl"]["presets"]["tuned"]) == set(get_args(presets.NetworkFamily))
