"""Tests of an installed third-party package: all commands and the service can use what it defines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import wait_until
from typer.testing import CliRunner

import fedleak

PLUGIN = Path(__file__).with_name("plugin")
EXPERIMENT = """
rounds = 1
model = {{ name = "{model}", width = 10 }}
data = {{ name = "{data}", count = 24 }}
partition = "{partition}"
clients = {{ count = 3 }}
training = {{ learning_rate = 0.1, batch_size = 1, steps = 1 }}
defense = "{defense}(0.5) | clip(10)"
"""
BY_ENTRY_POINT = {"model": "two_layers", "data": "discs", "partition": "in_turn", "defense": "shrink"}
BY_REFERENCE = {
    "model": "fedleak_example.model:two_layers",
    "data": "fedleak_example.data:discs",
    "partition": "fedleak_example.data:in_turn",
    "defense": "fedleak_example.defense:SHRINK",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which pip has installed the package, without a network."""
    work = tmp_path_factory.mktemp("plugin")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    source = work / "source"
    source.mkdir()
    for file in PLUGIN.rglob("*.*"):
        if file.suffix in (".py", ".toml"):
            (source / file.relative_to(PLUGIN)).parent.mkdir(exist_ok=True)
            (source / file.relative_to(PLUGIN)).write_bytes(file.read_bytes())
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(work / "site"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return work / "site"


@pytest.fixture
def plugged(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.delenv("FEDLEAK_CODE", raising=False)


def run(app: object, *arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_plugin_works_in_run_replay_score_report_and_the_service(plugged: None, tmp_path: Path) -> None:
    from attacker.cli import app as attacker
    from attacker.reconstruction import Reconstruction
    from attacker.scoring import read_rows
    from fedsim.cli import app as fedsim

    for kind, name in (("defenses", "shrink"), ("datasets", "discs"), ("partitions", "in_turn"), ("models", "two_layers")):
        assert name in run(fedsim, "list", kind)
    (listed,) = [one for one in json.loads(run(attacker, "list", "--json")) if one["name"] == "first_layer"]
    assert listed["arguments"] == {"row": "largest"}
    root, folder = tmp_path / "root", tmp_path / "root" / "discs"
    (tmp_path / "experiment.toml").write_text(EXPERIMENT.format(**BY_ENTRY_POINT))
    run(fedsim, "run", str(tmp_path / "experiment.toml"), "--out", str(folder), "--engine", "local", "--client-seed", "1")
    run(attacker, "replay", str(folder), "--attack", "first_layer", "--set", "row=mean")
    run(attacker, "score", str(folder), "--csv", str(tmp_path / "rows.csv"))
    rows = read_rows(folder / "scores.jsonl")
    assert {(row.null, row.success) for row in rows} == {(False, True), (True, False)}
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + len(rows)
    assert {row.defense for row in rows} == {"shrink(0.5) | clip(10)"}
    assert all(row.attack_code.startswith("fedleak_example.attack:FirstLayer@") for row in rows)
    assert "first_layer" in Path(run(attacker, "report", str(folder)).strip()).read_text()
    run(attacker, "replay", str(folder), "--attack", "cpl", "--set", "steps=5", "--set", "decoder=blocks", "--no-null")
    (decoded,) = (folder / "reconstructions").glob("cpl-*")
    for path in decoded.glob("*.safetensors"):
        x = Reconstruction.read(path).x.reshape(-1, 4, 2, 4, 2)
        assert torch.equal(x, x[:, :, :1, :, :1].expand_as(x))
    state = run_job(root)
    assert state.state == "done", state.error
    assert [(part.done, part.null) for part in state.result.attacks] == [(3, False), (3, True)]
    assert state.result.scored


def run_job(root: Path) -> object:
    """Run a job of the service on the same recording in a worker process, and return its final state."""
    from attacker.service.background import BackgroundWork
    from attacker.service.http.app import make_components
    from attacker.service.jobs.job import FINAL_STATES, JobSpec
    from attacker.service.settings import ServiceSettings

    components = make_components(ServiceSettings(root=root, truth="own", workers=1, stand_by=False))
    background = BackgroundWork(components)
    background.start()
    try:
        job = components.queue.submit(JobSpec(recording="discs", attack="first_layer", arguments={"row": "largest"}))
        wait_until(lambda: components.queue.get(job.id).state in FINAL_STATES, lambda: components.queue.get(job.id))
        return components.queue.get(job.id)
    finally:
        background.stop()


def test_a_broken_package_hides_no_other_attack(plugged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, EntryPoints

    from attacker.cli import app as attacker
    from attacker.service.http.general import _list_attacks

    broken = [
        EntryPoint(name="gone", value="no_such_module:attack", group="attacker.attacks"),
        EntryPoint(name="odd", value="fedleak_example.model:two_layers", group="attacker.attacks"),
        EntryPoint(name="first_layer", value="fedleak_example.attack:FirstLayer", group="attacker.attacks"),
    ]
    monkeypatch.setattr("defenses.registry.registry.entry_points", lambda **wanted: EntryPoints(broken).select(**wanted))
    result = CliRunner().invoke(attacker, ["list", "--json"])
    names = {one["name"] for one in json.loads(result.stdout)}
    assert {"cpl", "first_layer"} <= names
    assert not {"gone", "odd"} & names
    assert "No module named 'no_such_module'" in result.stderr
    _list_attacks.cache_clear()
    assert {one["name"] if isinstance(one, dict) else one.name for one in _list_attacks()} == names - {
        "learning_to_invert",
        "membership",
    }  # they need a file
    _list_attacks.cache_clear()


def test_a_package_without_entry_points_is_used_by_module_and_name(
    plugged: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attacker.cli import app as attacker
    from attacker.scoring import read_rows
    from fedsim.cli import app as fedsim
    from fedsim.recording import Recording

    folder, attack = tmp_path / "run", "fedleak_example.attack:FirstLayer"
    (tmp_path / "experiment.toml").write_text(EXPERIMENT.format(**BY_REFERENCE))
    run(fedsim, "run", str(tmp_path / "experiment.toml"), "--out", str(folder), "--engine", "local", "--client-seed", "1")
    monkeypatch.delenv("FEDLEAK_CODE")
    with pytest.raises(ValueError, match=r"fedleak_example\.defense:SHRINK.*--code fedleak_example\.defense:SHRINK"):
        Recording(folder / "recording")
    assert str(fedleak.load(folder, code=[BY_REFERENCE["defense"]]).manifest.defense).startswith(BY_REFERENCE["defense"])
    monkeypatch.delenv("FEDLEAK_CODE")
    code = [word for key in ("defense", "data") for word in ("--code", BY_REFERENCE[key])]
    run(attacker, *code, "replay", str(folder), "--attack", attack, "--model", BY_REFERENCE["model"])
    decoder = "decoder=fedleak_example.decoder:blocks"
    run(attacker, *code, "replay", str(folder), "--attack", "cpl", "--set", "steps=3", "--set", decoder, "--no-null",
        "--model", BY_REFERENCE["model"])  # fmt: skip
    run(attacker, *code, "score", str(folder))
    rows = read_rows(folder / "scores.jsonl")
    found = {(row.attack, row.null, row.success) for row in rows if row.attack == attack}
    assert found == {(attack, False, True), (attack, True, False)}
