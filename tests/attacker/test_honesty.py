"""The wall between attacks and truth: what is on either side, and that the guard would see a hole."""

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attacker.attacks import ATTACKS, Case
from attacker.reconstruction import Reconstruction

ROOT = Path(__file__).parents[2]
BLOCKED = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(folder), "PATH": ""})


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for package in ("attacker", "fedsim", "defenses"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_import_contracts_hold_on_a_copy(copied: Path) -> None:
    told = lint(copied)
    assert told.returncode == 0, told.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("attacker/attacks/matching.py", "from fedsim.truth import TruthReader"),
        ("attacker/attacks/labels.py", "from fedsim import datasets"),
        ("attacker/attacks/papers.py", "from attacker.scoring.oracle import true_labels"),
        ("attacker/replay.py", "from fedsim.truth import TruthReader"),
        ("attacker/reconstruction.py", "from fedsim import partition"),
        ("fedsim/wire/observation.py", "from fedsim.truth import Used"),
        ("fedsim/server/strategy.py", "from fedsim import datasets"),
        ("defenses/noise.py", "from fedsim.wire import Recording"),
        ("attacker/attacks/base.py", "import flwr"),
    ],
)
def test_a_hole_in_the_wall_is_seen(copied: Path, file: str, line: str) -> None:
    path = copied / file
    path.write_text(f"{line}\n{path.read_text()}")
    told = lint(copied)
    assert told.returncode == 1
    assert "BROKEN" in told.stdout


def test_attacks_work_where_neither_flower_nor_data_nor_truth_exist() -> None:
    """The attack of `test_matching`, in a process in which all that could hold truth cannot be imported."""
    names = ["flwr", "ray", "pydantic", "typer", "sklearn", "skimage", "fedsim.truth", "fedsim.datasets", "fedsim.partition"]
    program = BLOCKED.format(names=[*names, "fedsim.client", "fedsim.server", "attacker.scoring"]) + (
        "import torch, attacker.replay\n"
        "from attacker.attacks import AttackSpec, ATTACKS\n"
        "print(sorted(ATTACKS), [AttackSpec(name=n).build().needs is not None for n in ATTACKS])\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert told.returncode == 0, told.stderr
    assert "cpl" in told.stdout


def test_nothing_that_an_attack_takes_mentions_truth_or_data_sets() -> None:
    assert set(inspect.signature(Case).parameters) == {"observations", "known_labels", "known_logits", "links"}
    for name in ATTACKS:
        call = inspect.signature(type(ATTACKS[name]()).__call__)
        assert list(call.parameters) == ["self", "cases", "rng", "progress", "memory"]
        assert not {"truth", "dataset", "loader", "labels", "oracle"} & set(inspect.signature(ATTACKS[name]).parameters)


def test_reconstructions_hold_no_truth() -> None:
    fields = set(inspect.signature(Reconstruction).parameters)
    assert fields == {
        "case", "x", "y", "confidence", "slots", "loss", "iterations", "evaluations", "restarts", "seconds",
        "route", "attack", "oracles", "seed", "interrupted", "notes",
    }  # fmt: skip
