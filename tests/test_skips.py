"""Tests that a test run prints how many tests were skipped and why, for example since real data are absent."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SKIPPING = """
import pytest

@pytest.fixture
def data():
    pytest.skip("no data at there")

def test_first(data): ...
def test_second(data): ...

@pytest.mark.skipif(True, reason="no compiler")
def test_third(): ...

def test_that_runs(): ...
"""


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


def test_skipped_tests_are_counted_by_their_reasons(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    stand_in = "def set_num_threads(count): ..."  # conftest.py needs no more of torch, whose import takes seconds
    (tmp_path / "torch.py").write_text(stand_in)
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    lines = run(tmp_path).splitlines()
    assert "tests skipped: 3: 2 because no data at there; 1 because no compiler" in lines
    assert "tests skipped: 0" in run(tmp_path, "-k", "runs").splitlines()


def test_make_test_shows_each_reason_and_the_gate_repeats_the_count() -> None:
    root = Path(__file__).parents[1]
    makefile = (root / "Makefile").read_text()
    parts = re.findall(
        r"^test-(?:fedsim|others|attacks|service|attacker): .*\n\tOMP_NUM_THREADS=1 \$\(BIN\)/pytest (.*)$", makefile, re.M
    )
    assert "--jobs=3 test-fedsim test-attacks test-attacker test-others check test-service" in makefile
    assert all(part.startswith("-rs ") for part in parts)
    assert sorted(part.removeprefix("-rs ") for part in parts) == [
        "--ignore=tests/attacker --ignore=tests/fedsim",
        "tests/attacker --ignore=tests/attacker/attacks --ignore=tests/attacker/service",
        "tests/attacker/attacks",
        "tests/attacker/service",
        "tests/fedsim",
    ]  # every test is in exactly one part
    gate = root / ".ci" / "run"
    if gate.exists():  # not in a release
        assert "tests skipped" in gate.read_text()
