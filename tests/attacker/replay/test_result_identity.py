"""Tests that results have separate folders if anything that defines them differs, including code of custom networks."""

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command_line import run_attacker
from federations import federate, make_replay

from attacker.attacks import ATTACKS, AttackSpec
from attacker.replay import identity, metadata
from attacker.replay.identity import identify_version
from attacker.replay.replay import Replay
from attacker.report.gather import gather_run
from attacker.scoring import Scorer, summarise
from fedsim import models
from fedsim.config.experiment import admit_code
from fedsim.models.source_code import find_code_to_ship, identify_code
from fedsim.recording import Recording

NETWORK = """
from torch import nn
from their_layers import activation
from their_sizes import HIDDEN

def first(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), activation(), nn.Linear(HIDDEN, num_classes))

def second(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, num_classes))
"""
SIZES = "HIDDEN = 8\n"
LAYERS = "from torch import nn\n\ndef activation():\n    return nn.Sigmoid()\n"


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder with the modules of a custom network, which can be imported."""
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "their_network.py").write_text(NETWORK)
    (folder / "their_layers.py").write_text(LAYERS)
    (folder / "their_sizes.py").write_text(SIZES)
    monkeypatch.syspath_prepend(str(folder))
    remove_modules()
    yield folder
    remove_modules()


def remove_modules() -> None:
    """Remove the app's modules from those imported, so that they are imported again, as by a later command."""
    for name in ("their_network", "their_layers", "their_sizes"):
        sys.modules.pop(name, None)


def federate_once(folder: Path, model: str) -> Path:
    admit_code({"model": model})
    return federate(folder, model=model, clients=1)


def replay(run: Path, model: str | None = None, *, null: bool = False, **settings) -> Replay:
    recording = Recording(run / "recording")
    if model is not None:
        models.admit(model, name=recording.manifest.model.name)
    spec = AttackSpec(name="cpl", arguments={"steps": 2}, null=null)
    return Replay(recording=recording, spec=spec, out=run / "reconstructions", model=model, **settings)


def test_results_of_two_networks_are_separate(app: Path, tmp_path: Path) -> None:
    run = federate_once(tmp_path / "run", "their_network:first")
    assert replay(run, "their_network:first").run().done == 1
    assert replay(run, "their_network:first").run().skipped == 1
    other = replay(run, "their_network:second").run()
    assert (other.done, other.skipped) == (1, 0)


@pytest.mark.parametrize("file", ["their_network.py", "their_layers.py", "their_sizes.py"])
def test_results_of_an_edited_network_are_separate(app: Path, tmp_path: Path, file: str) -> None:
    run = federate_once(tmp_path / "run", "their_network:first")
    before = replay(run, "their_network:first").folder
    source = app / file
    source.write_text(
        source.read_text().replace("Sigmoid", "Tanh").replace("nn.Flatten(), ", "nn.Flatten(1), ").replace("= 8", "= 4 + 4")
    )
    assert replay(run, "their_network:first").folder == before  # this process still runs the imported code
    remove_modules()
    assert replay(run, "their_network:first").folder != before


def test_each_network_has_its_own_null(app: Path, tmp_path: Path) -> None:
    run = federate_once(tmp_path / "run", "their_network:first")
    folders = {
        (name, null): replay(run, f"their_network:{name}", null=null).run().folder
        for name in ("first", "second")
        for null in (False, True)
    }
    scorer = Scorer(run, [run / "truth"])
    rows = [row for folder in folders.values() for row in scorer.score(folder)]
    pairs = {(summary.source, summary.null.source) for summary in summarise(rows)}
    assert pairs == {(folders[name, False].name, folders[name, True].name) for name in ("first", "second")}
    shown = {(attack.source, attack.null.source) for attack in gather_run(run).attacks}
    assert shown == pairs


def test_results_of_an_edited_file_are_separate(tmp_path: Path) -> None:
    run, archive = federate_once(tmp_path / "run", "mlp"), tmp_path / "candidates.npz"
    spec = AttackSpec(name="membership", arguments={"candidates": str(archive)})
    folders = set()
    for seed in range(2):
        images = np.random.default_rng(seed).integers(0, 256, (20, 8, 8), dtype=np.uint8)
        np.savez(archive, images=images, labels=np.arange(20) % 10)
        done = make_replay(run, spec).run()
        assert (done.done, done.skipped) == (1, 0)
        folders.add(done.folder)
    assert len(folders) == 2


def test_results_with_other_defaults_are_separate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = federate_once(tmp_path / "run", "mlp")
    before = replay(run).folder
    from attacker.attacks.papers import matching

    changed = dict(zip(matching.cpl.__code__.co_varnames, matching.cpl.__defaults__ or (), strict=False))
    key = next(key for key, value in (matching.cpl.__kwdefaults__ or changed).items() if isinstance(value, float))
    if matching.cpl.__kwdefaults__:
        monkeypatch.setitem(matching.cpl.__kwdefaults__, key, 0.123)
    else:
        values = tuple(0.123 if name == key else value for name, value in changed.items())
        monkeypatch.setattr(matching.cpl, "__defaults__", values)
    assert replay(run).folder != before


def test_answers_of_another_version_are_kept_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = federate_once(tmp_path / "run", "mlp")
    assert not replay(run).run().reuse
    assert not replay(run).run().reuse  # the same version continues without a word
    for module in (identity, metadata):
        monkeypatch.setattr(module, "identify_version", lambda: "9.9+0123abcd")
    again = replay(run).run()
    assert (again.done, again.skipped) == (0, 1)
    assert f"1 finished case in {again.folder}: all or some by {identify_version()}, and this is 9.9+0123abcd" in again.reuse
    assert again.reuse in again.notes
    facts = json.loads((again.folder / "attack.json").read_text())
    assert facts["code"] == [identify_version(), "9.9+0123abcd"]
    shutil.rmtree(again.folder)  # the advice
    fresh = replay(run).run()
    assert (fresh.done, fresh.reuse) == (1, "")


def test_the_version_depends_on_the_sources_of_attacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attacks").mkdir()
    monkeypatch.setattr(identity, "SOURCE_FOLDERS", (tmp_path / "attacks",))
    compute = identify_version.__wrapped__
    found = set[str]()
    for content in ("a = 1", "a = 2"):
        (tmp_path / "attacks" / "one.py").write_text(content)
        (tmp_path / "attacks" / "one.pyc").write_text(str(len(found)))
        found |= {compute(), compute()}
    assert len(found) == 2


def test_only_custom_code_has_a_digest() -> None:
    assert identify_code(ATTACKS["cpl"]) == ""
    assert identify_code(federate_once).startswith(f"{__name__}:federate_once@")
    assert identify_code(federate_once) != identify_code(replay)
    assert identify_code(len).startswith("builtins:len@")


@pytest.mark.parametrize("installed", ["env/lib/python3.11/site-packages", "usr/lib/python3/dist-packages"])
def test_packages_of_another_environment_are_no_code_of_the_user(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    """Flower puts the packages of a run into an environment of its own, from which the app then imports PyTorch."""
    folder = tmp_path / installed
    folder.mkdir(parents=True)
    (app / "their_layers.py").rename(folder / "their_layers.py")
    monkeypatch.syspath_prepend(str(folder))
    digests = set[str]()
    for source in (LAYERS, LAYERS.replace("Sigmoid", "Tanh")):
        (folder / "their_layers.py").write_text(source)
        remove_modules()
        network = importlib.import_module("their_network")
        digests.add(identify_code(network.first))
        assert find_code_to_ship([network]) == [app / "their_network.py", app / "their_sizes.py"]
    assert len(digests) == 1


def test_client_is_selected_by_the_beginning_of_its_name(tmp_path: Path) -> None:
    run = federate_once(tmp_path / "run", "mlp")
    (name,) = Recording(run / "recording").list_clients()
    assert replay(run, clients=frozenset({name[:4]})).run().done == 1
    with pytest.raises(ValueError, match="holds no client 'nobody'"):
        replay(run, clients=frozenset({"nobody"})).run()


def test_results_with_an_oracle_depend_on_the_true_examples(tmp_path: Path) -> None:
    """The contents of the folder of true examples matter, its path does not; a replay without an oracle does not read it."""
    run = federate_once(tmp_path / "run", "lenet_dlg")
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(run / "truth", moved), shutil.copytree(run / "truth", other)
    (path,) = other.glob("*.jsonl")
    row = json.loads(path.read_text())
    path.write_text(json.dumps({**row, "indices": [row["indices"][0] + 1]}) + "\n")
    folders = {}
    for truth in (run / "truth", moved, other):
        for oracles in ([], ["--oracle", "labels"]):
            call = [
                "replay",
                str(run),
                "--attack",
                "cpl",
                "--set",
                "steps=1",
                "--no-null",
                "--truth",
                str(truth),
                *oracles,
                "--json",
            ]
            done = run_attacker(*call)
            assert done.exit_code == 0, done.output
            folders[truth.name, bool(oracles)] = json.loads(done.stdout)[0]["folder"]
    assert folders["truth", True] == folders["moved", True] != folders["other", True]
    assert len({folders[name, False] for name in ("truth", "moved", "other")}) == 1
