"""Tests that code named as `module:function` is imported only if the local user admitted it."""

import json
import os
import sys
from pathlib import Path

import pytest

from defenses import DefenseSpec
from defenses.registry import Registry, calls, references

MODULE = "code_of_somebody_else"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that sets an environment variable when it is imported."""
    (tmp_path / f"{MODULE}.py").write_text(
        "import os\n"
        "os.environ['WAS_IMPORTED'] = 'yes'\n"
        "from defenses import Channel, Kind, stateless\n"
        "def halve(by=2.0):\n    return stateless(lambda update, rng: {k: v / by for k, v in update.items()})\n"
        "KIND = Kind(halve, lambda by=2.0: Channel(lambda update, known: {k: v / by for k, v in update.items()}))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WAS_IMPORTED", "no")
    monkeypatch.setenv(references.CODE_VARIABLE, "")
    yield MODULE
    sys.modules.pop(MODULE, None)


def is_untouched() -> bool:
    return os.environ["WAS_IMPORTED"] == "no" and MODULE not in sys.modules


def test_a_specification_names_admitted_code_and_prints_it_back(module: str) -> None:
    text = f"clip(1.0) | {module}:KIND(by=4.0)"
    with pytest.raises(ValueError, match=f"put --code {module}:KIND before the command"):
        DefenseSpec.parse(text)
    assert is_untouched()
    references.admit(f"{module}:KIND")
    spec = DefenseSpec.parse(text)
    assert DefenseSpec.parse(str(spec)) == spec
    assert spec.steps[1].name == f"{module}:KIND"


def test_what_is_in_quotes_is_no_reference() -> None:
    (step,) = calls.parse("load('a:b', \"c:d\")", lambda name: lambda path, other: None, "thing")
    assert dict(step.arguments) == {"path": "a:b", "other": "c:d"}
    assert references.find_references("top_k('x:y') | m.n:f(1) | clip(2)") == ["m.n:f"]


def test_a_registry_refuses_code_of_another_type(module: str) -> None:
    references.admit(f"{module}:halve")
    with pytest.raises(ValueError, match=r"must be a defenses\.spec\.Kind, got function"):
        DefenseSpec.parse(f"{module}:halve()")


@pytest.mark.parametrize("wrong", ["os", "os:", ":system", "os:system()", "os system:x", "../os:system", "os:system,sys:exit"])
def test_what_is_no_reference_is_not_admitted(wrong: str, module: str) -> None:
    with pytest.raises(ValueError, match="write module:function"):
        references.admit(wrong)
    assert references.list_admitted() == ()


def test_admitted_code_is_passed_on_in_an_environment_variable(module: str) -> None:
    references.admit(f"{module}:halve")
    assert references.is_admitted(f"{module}:halve")
    assert os.environ[references.CODE_VARIABLE] == f"{module}:halve"
    registry: Registry[object] = Registry("toys", {})
    assert callable(registry[f"{module}:halve"])


def test_manifests_replay_jobs_and_server_settings_import_no_code(module: str, tmp_path: Path) -> None:
    from attacker.attacks import AttackSpec
    from attacker.replay.tasks import ReplayJob
    from fedsim import data, models
    from fedsim.config.experiment import ExperimentError, validate
    from fedsim.data.partition import PARTITIONS
    from fedsim.recording import DataSpec, Manifest, ModelSpec, Training

    names = f"{module}:KIND"
    raw = {
        "rounds": 1,
        "model": f"{module}:halve",
        "data": f"{module}:halve",
        "clients": {"count": 2},
        "training": {"learning_rate": 0.1, "batch_size": 1, "steps": 1},
        "partition": f"{module}:halve",
    }
    experiment = validate(raw, source="a server's settings")
    with pytest.raises(ExperimentError, match="not part of this project"):
        validate({**raw, "defense": f"{names}()"}, source="a server's settings")
    spec, shape = ModelSpec(name=experiment.model.name), DataSpec(shape=(1, 4, 4), num_classes=2)
    manifest = Manifest(
        name="run", model=spec, data=shape, training=Training(learning_rate=0.1, batch_size=1, steps=1),
        defense=DefenseSpec(), software={},
    )  # fmt: skip
    manifest.write(tmp_path / "manifest.json")
    written = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**written, "defense": f"{names}()"}))
    job = ReplayJob(
        recording=str(tmp_path), folder=str(tmp_path), attack=names, arguments={}, null=False, seed=0, device="cpu"
    )  # fmt: skip
    attempts = (
        lambda: Manifest.read(tmp_path / "manifest.json"),
        lambda: models.build(spec, shape),
        lambda: data.load(experiment.data.name),
        lambda: PARTITIONS[experiment.partition.name],
        lambda: AttackSpec(name=names),
        lambda: job.spec,
    )
    for attempt in attempts:
        with pytest.raises(ValueError, match=r"not part of (this project|fedleak)"):
            attempt()
    assert is_untouched()


def test_a_client_imports_nothing_that_a_server_names(module: str, tmp_path: Path) -> None:
    from flwr.app import Context, RecordDict

    from fedsim.engine.flower_app import find_client_run

    (tmp_path / "asked.toml").write_text(
        f'rounds = 1\nmodel = "{module}:halve"\ndata = "digits"\nclients = {{ count = 2 }}\n'
        f'defense = "{module}:KIND()"\ntraining = {{ learning_rate = 0.1, batch_size = 1, steps = 1 }}\n'
    )
    asked = {"out": str(tmp_path), "resume": False}
    node = {"private": str(tmp_path / "private"), "data": "digits"}
    for config in (
        {**asked, "experiment": "x", "settings": (tmp_path / "asked.toml").read_text()},
        {**asked, "experiment": str(tmp_path / "asked.toml")},
    ):
        context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=config)
        with pytest.raises(ValueError, match="not part of this project"):
            find_client_run(context)
        assert is_untouched()
    agreed = {**node, "experiment": str(tmp_path / "asked.toml")}
    context = Context(run_id=1, node_id=1, node_config=agreed, state=RecordDict(), run_config=config)
    assert find_client_run(context).experiment.model.name == f"{module}:halve"
    assert not is_untouched()
