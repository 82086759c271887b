"""Tests of the fields of a score row that describe machine and code."""

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from attacker.replay import environment as module
from attacker.replay.environment import describe_environment, read_commit


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Folder of a git work tree with one committed file of code."""
    (tmp_path / "attacker").mkdir()
    (tmp_path / "attacker" / "code.py").write_text("x = 1\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        git(tmp_path, *arguments)
    return tmp_path


def test_commit_is_that_of_the_work_tree_and_marks_changed_code(tree: Path) -> None:
    head = git(tree, "rev-parse", "HEAD")
    assert read_commit(tree) == head
    (tree / "notes.txt").write_text("not code")
    assert read_commit(tree) == head
    (tree / "attacker" / "new.py").write_text("y = 2\n")
    assert read_commit(tree) == f"{head}+dirty"
    (tree / "attacker" / "new.py").unlink()
    (tree / "attacker" / "code.py").write_text("x = 2\n")
    assert read_commit(tree) == f"{head}+dirty"


def test_no_commit_outside_a_work_tree_or_without_git(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_commit(tree / "attacker") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_commit(tree) is None


def test_versions_and_hardware_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = describe_environment()
    json.dumps(facts, allow_nan=False)
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == version("torch")
    assert facts["cores"] >= 1
    assert facts["processor"]
    assert (facts["gpu"] is None) != torch.cuda.is_initialized()
    monkeypatch.setattr(module, "VERSIONED_PACKAGES", ("no-such-package",))
    module._describe_machine.cache_clear()
    assert describe_environment()["no-such-package"] is None
    module._describe_machine.cache_clear()


def test_git_is_run_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    describe_environment()
    monkeypatch.setattr(module, "_run_git", lambda *_: pytest.fail("asked again"))
    assert describe_environment() == describe_environment()
