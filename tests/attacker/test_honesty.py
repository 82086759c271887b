"""Tests that attacks cannot access the true examples: import contracts, blocked modules, opened files, and arguments."""

import inspect
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from observations import observe_steps

from attacker.attacks import ATTACKS, Case
from attacker.reconstruction import Reconstruction
from fedsim.recording import DataSpec, ModelSpec

ROOT = Path(__file__).parents[2]
CANDIDATES = Path(__file__).parent / "attacks" / "membership" / "candidates.npz"
BLOCKED = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(folder), "PATH": ""})


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for package in ("fedleak", "attacker", "fedsim", "defenses"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_import_contracts_hold_on_a_copy(copied: Path) -> None:
    result = lint(copied)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("attacker/attacks/matching/gradient_matching.py", "from fedsim.truth import TruthReader"),
        ("attacker/attacks/labels/rules.py", "from fedsim import data"),
        ("attacker/attacks/papers/matching.py", "from attacker.scoring.oracle import read_true_labels"),
        ("attacker/replay/replay.py", "from fedsim.truth import TruthReader"),
        ("attacker/reconstruction.py", "from fedsim.data import partition"),
        ("fedsim/recording/observation.py", "from fedsim.truth import RoundUsage"),
        ("fedsim/strategies/recording_strategy.py", "from fedsim import data"),
        ("defenses/noise.py", "from fedsim.recording import Recording"),
        ("attacker/attacks/base.py", "import flwr"),
    ],
)
def test_forbidden_import_breaks_the_contracts(copied: Path, file: str, line: str) -> None:
    path = copied / file
    path.write_text(f"{line}\n{path.read_text()}")
    result = lint(copied)
    assert result.returncode == 1
    assert "BROKEN" in result.stdout


RUN_ALL_ATTACKS = """
import pickle, sys
from dataclasses import replace
from inspect import signature
from pathlib import Path
import torch
import attacker.replay.replay
from attacker.attacks import ATTACKS, AttackSpec, Case, Need

of_kinds = pickle.loads(Path(sys.argv[1]).read_bytes())
opened = []

def watch(event, given):
    if event == "open" and isinstance(given[0], str | bytes) and not str(given[0]).endswith((".py", ".pyc", ".so")):
        opened.append(str(given[0]))

sys.addaudithook(watch)
for name in ATTACKS:
    for null in (False, True):
        own = {"steps": 2, "pre_steps": 2, "candidates": sys.argv[2], "images": sys.argv[2], "simulations": 20, "epochs": 2}
        own = {key: value for key, value in own.items() if key in signature(ATTACKS[name]).parameters}
        attack = AttackSpec(name=name, arguments=own, null=null).build()
        fitting = {Need.IMPRINT_LAYER: "imprint", Need.GAUSSIAN_LAYER: "wide", Need.SECURE_SUM: "sum", Need.INPUT_LAYER: "mlp"}
        rounds = of_kinds[next((kind for need, kind in fitting.items() if need in attack.needs), "lenet_dlg")]
        cases = [Case(tuple(rounds))] if Need.SAME_CLIENT in attack.needs else [Case((rounds[0],))]
        (found,) = attack(cases, rng=torch.Generator().manual_seed(0))
        print("ran", name, null, found.attack, tuple(found.x.shape[1:]))
print("opened", [path for path in opened if Path(path).resolve().is_relative_to(Path(sys.argv[1]).resolve().parent)])
print("loaded", *sorted(m for m in sys.modules if m.startswith(("fedsim.", "attacker.")) and sys.modules[m] is not None))
"""
WITH_TRUE_EXAMPLES = (
    "fedsim.truth", "fedsim.data", "fedsim.client", "fedsim.server", "fedsim.strategies", "fedsim.training", "fedsim.secagg",
    "fedsim.engine", "fedsim.config", "fedsim.deployment", "attacker.scoring", "attacker.commands",
)  # fmt: skip
"""Modules that could hold or read the examples that clients trained on."""


def test_every_attack_runs_without_modules_that_hold_true_examples(tmp_path: Path) -> None:
    """Each attack and its null run on two rounds of one example, and may not open any file beside the recording."""
    data, x = DataSpec(shape=(1, 8, 8), num_classes=4), torch.rand(1, 1, 8, 8)
    kinds = {
        "lenet_dlg": {"model": ModelSpec(name="lenet_dlg")},
        "mlp": {"model": ModelSpec(name="mlp")},
        "sum": {"model": ModelSpec(name="mlp"), "client": "sum"},
        "imprint": {"model": ModelSpec(name="imprint", arguments={"bins": 16})},
        "wide": {"model": ModelSpec(name="wide_head", arguments={"features": 16, "neurons": 256})},
    }
    seen = {}
    for kind, own in kinds.items():
        both = [observe_steps((x, torch.tensor([2])), data=data, learning_rate=0.01, **own) for _ in "12"]
        seen[kind] = [replace(one, round=number) for number, one in enumerate(both, start=1)]
    (tmp_path / "rounds").write_bytes(pickle.dumps(seen))
    (tmp_path / "truth.json").write_text("{}")
    program = (
        BLOCKED.format(names=["flwr", "ray", "pydantic", "typer", "sklearn", "skimage", *WITH_TRUE_EXAMPLES]) + RUN_ALL_ATTACKS
    )
    command = [sys.executable, "-c", program, str(tmp_path / "rounds"), str(CANDIDATES)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    *ran, opened, loaded = result.stdout.splitlines()
    assert ran == [f"ran {name} {null} {name} (1, 8, 8)" for name in ATTACKS for null in (False, True)]
    assert opened == "opened []"
    assert not [module for module in loaded.split()[1:] if module.startswith(WITH_TRUE_EXAMPLES)]


@pytest.mark.parametrize("module", ["fedsim.truth", "fedsim.data", "attacker.scoring"])
def test_blocked_modules_cannot_be_imported(module: str) -> None:
    program = BLOCKED.format(names=WITH_TRUE_EXAMPLES) + f"import {module}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert "ModuleNotFoundError" in result.stderr


def test_arguments_of_attacks_hold_no_true_examples() -> None:
    assert set(inspect.signature(Case).parameters) == {"observations", "known_labels", "known_logits", "links"}
    for name in ATTACKS:
        call = inspect.signature(type(ATTACKS[name]()).__call__)
        assert list(call.parameters) == ["self", "cases", "rng", "progress", "memory"]
        assert not {"truth", "dataset", "loader", "labels", "oracle"} & set(inspect.signature(ATTACKS[name]).parameters)


def test_reconstructions_hold_no_true_examples() -> None:
    fields = set(inspect.signature(Reconstruction).parameters)
    assert fields == {
        "case", "x", "y", "confidence", "slots", "loss", "iterations", "evaluations", "restarts", "seconds",
        "route", "attack", "oracles", "seed", "interrupted", "notes", "explained", "evidence",
    }  # fmt: skip
