"""Tests of the wheel: it contains every file of the packages, and works outside the repository when installed offline."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("attacker", "defenses", "fedleak", "fedsim")
OFFLINE = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.pyc")
CHECKS = """
import sys
from importlib.resources import files
from pathlib import Path

import attacker, defenses, fedleak, fedsim

site = Path(sys.argv[1])
for package in (attacker, defenses, fedleak, fedsim):
    assert Path(package.__file__).is_relative_to(site), package.__file__
    assert (files(package) / "py.typed").is_file(), package

from attacker.attacks import presets
assert presets.get_settings("cpl")["tuned"]

from attacker.attacks.confidence import curves
assert curves.CALIBRATION_FILE.is_file()

from attacker.commands.demo import DEMO_FEDERATIONS, EXPERIMENT_FILE
from fedsim.config.experiment import read
for federation in DEMO_FEDERATIONS.values():
    assert read(EXPERIMENT_FILE, list(federation.overrides.items())).rounds

from attacker.service.http.app import PAGE_FOLDER
assert "<html" in (PAGE_FOLDER / "index.html").read_text().lower()
for kind in ("*.js", "style/*.css", "views/*.js"):
    assert list(PAGE_FOLDER.glob(kind)), kind

from attacker.report import render

import torch
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
x, y = torch.rand(1, 1, 8, 8), torch.tensor([1])
gradient = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y), list(model.parameters()))
observation = fedleak.observe(model, "cross_entropy", gradient, shape=(1, 8, 8))
scores = fedleak.score(fedleak.attack(observation, "exact"), x, y)
assert scores.rows[0].success
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the packages, so that nothing is written into the repository."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=NOT_SHIPPED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run("wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", str(out), str(source))
    (built,) = out.glob("fedleak-*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel is installed."""
    site = tmp_path_factory.mktemp("site")
    run("install", *OFFLINE, "--target", str(site), str(wheel))
    return site


def run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def make_environment(site: Path) -> dict[str, str]:
    """Return the environment of a process that imports the installed packages before those of the repository."""
    return {**os.environ, "PYTHONPATH": str(site)}


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    there = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == there


def test_the_packages_work_from_another_folder(site: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error::SyntaxWarning", "-c", CHECKS, str(site)]
    done = subprocess.run(command, cwd=tmp_path, env=make_environment(site), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["fedsim", "attacker"])
def test_the_installed_commands_print_their_help(site: Path, tmp_path: Path, name: str) -> None:
    command = [sys.executable, str(site / "bin" / name), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=make_environment(site), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--code" in done.stdout
