"""Tests that the files written by `fedsim init` run unchanged, and that it overwrites nothing."""

import importlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command_line import join_lines, run_fedsim
from flwr.app import Context, RecordDict
from PIL import Image

from attacker.attacks import AttackSpec
from attacker.replay.replay import Replay
from fedsim import models
from fedsim.config.experiment import read
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        for i in range(5):
            Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(tmp_path / "mine" / name / f"{i}.png")
    rows = "\n".join(f"{20 + i},{'no' if i % 2 else 'yes'}" for i in range(40))
    (tmp_path / "mine.csv").write_text(f"age,sick\n{rows}\n")
    return tmp_path


@pytest.mark.parametrize("arguments", [("photos",), ("imagefolder", "--data", "mine"), ("csv", "--data", "mine.csv")])
def test_an_experiment_runs_as_it_is_written(folder: Path, arguments: tuple[str, ...]) -> None:
    kind, *data = arguments
    result = run_fedsim("init", kind, "start", *data)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == "fedsim run start/experiment.toml --out start/run"
    experiment = read(folder / "start" / "experiment.toml", [("rounds", 1)])
    engine.run(FederationRun(experiment=experiment, out=folder / "start" / "run", client_seed=1), engine="local")
    assert sum(row.status == "complete" for row in Recording(folder / "start" / "run" / "recording").read_rows()) >= 4


@pytest.fixture
def flower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a Flower app that `fedsim init` wrote; its modules can be imported."""
    assert run_fedsim("init", "flower", "an app").exit_code == 0
    monkeypatch.syspath_prepend(str(folder / "an app"))
    yield folder / "an app"
    for name in [name for name in sys.modules if name.partition(".")[0] == "app"]:
        del sys.modules[name]


def test_the_flower_app_is_recorded_in_its_own_folder_and_can_be_attacked(flower: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tomllib.loads((flower / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert Path(settings["config"]["recorded"]) == flower / "recorded"
    server, client = (
        getattr(importlib.import_module(module), name)
        for module, _, name in (settings["components"][key].partition(":") for key in ("serverapp", "clientapp"))
    )
    grid = engine.LocalGrid(client, 2)
    monkeypatch.chdir("/")
    config = {**settings["config"], "num-server-rounds": 1}
    server(grid, Context(run_id=grid.run.run_id, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    recording = Recording(flower / "recorded" / "recording")
    models.admit(recording.manifest.model.name)
    replay = Replay(recording=recording, spec=AttackSpec(name="cpl", arguments={"steps": 2}), out=flower / "recorded" / "found")
    assert replay.run().done == 2


def test_existing_files_are_kept_and_then_nothing_is_written(folder: Path) -> None:
    (folder / "start" / "app").mkdir(parents=True)
    (folder / "start" / "app" / "task.py").write_text("mine")
    refused = run_fedsim("init", "flower", "start")
    assert refused.exit_code == 2
    assert "task.py exists already" in join_lines(refused.stderr)
    assert [path.name for path in (folder / "start").rglob("*.*")] == ["task.py"]
    assert (folder / "start" / "app" / "task.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "expected"), [(("fotos",), "Did you mean 'photos'?"), (("photos", "--data", "mine"), "photos has its own data")]
)
def test_wrong_usage_is_refused(folder: Path, arguments: tuple[str, ...], expected: str) -> None:
    refused = run_fedsim("init", *arguments)
    assert refused.exit_code == 2
    assert expected in join_lines(refused.stderr)
    assert not (folder / "experiment.toml").exists()


def test_the_quickstart_app_has_batches_of_32(folder: Path) -> None:
    result = run_fedsim("init", "quickstart", "demo")
    assert result.exit_code == 0, result.output
    assert "attacker audit demo" in result.stdout
    config = tomllib.loads((folder / "demo" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert (config["examples"], config["batch-size"]) == (32, 32)
