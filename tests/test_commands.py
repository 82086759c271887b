"""Tests of help texts, mistakes and exit statuses of commands. Those of README and documentation are run in tests/docs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import attacker.cli
import fedsim.cli

ROOT = Path(__file__).parents[1]
PROGRAMS = {"fedsim": fedsim.cli.app, "attacker": attacker.cli.app}


def call(command: str) -> Result:
    """Run a command line in this process, since a separate process would need seconds for imports."""
    program, *words = shlex.split(command)
    return CliRunner(env={"COLUMNS": "80"}).invoke(PROGRAMS[program], words)


@pytest.mark.parametrize(("program", "words"), [("fedsim", "show nowhere"), ("attacker", "replay nowhere --attack cpl")])
def test_an_installed_program_ends_with_one_line_and_a_status(program: str, words: str, tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name(program), *words.split()]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (2, "")
    assert "nowhere" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("program", ["fedsim", "attacker"])
def test_every_command_is_explained_in_a_line_and_its_help_has_an_example(program: str) -> None:
    listed = call(f"{program} --help").stdout
    names = re.findall(r"^│ (\w+) +\w", listed.split("Commands")[1], re.MULTILINE)
    assert names
    for name in names:
        result = call(f"{program} {name} --help")
        assert result.exit_code == 0
        assert f"Example:  {program} {name}" in " ".join(result.stdout.split()).replace("Example: ", "Example:  ")
        arguments = re.search(r"─ Arguments ─.*?\n(.*?)╰", result.stdout, re.DOTALL)
        rows = re.findall(r"^│ [* ] {1,4}(\w+) +\S+ +(.*?) *│$", arguments[1] if arguments else "", re.MULTILINE)
        assert all(words and not words.startswith("[required]") for _, words in rows), (name, rows)
        assert bool(rows) == bool(arguments), name


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("attacker replay nowhere --attack cpl", 2, "nowhere is neither a run nor a recording"),
        ("attacker score nowhere", 2, "nowhere does not exist; give a run, its reconstructions"),
        ("attacker replay {run} --attack dgl", 2, "Did you mean 'dlg'?"),
        ("attacker replay {run} --attack cpl --set inti=dark", 2, "unexpected keyword argument 'inti'"),
        ("attacker replay {run} --attack cpl --set init=drak", 2, "unknown init 'drak'"),
        ("attacker replay {run} --attack cpl --oracle images", 2, "unknown oracle 'images'"),
        ("attacker replay {run} --attack cpl --rounds 5-9", 2, "holds no round 5-9. Its rounds: 1"),
        ("attacker replay {run} --attack cpl --device cuda:99", 2, "cuda:99"),
        ("attacker replay {run} --attack cpl --set steps=abc", 2, "cpl: steps must be a whole number above 0, got 'abc'"),
        ("attacker replay {run} --attack cpl --set knows_defense=maybe", 2, "knows_defense must be true or false"),
        (
            "attacker replay {run} --attack cpl --set init=insider --set auxiliary=no.npz",
            2,
            "the file no.npz of the argument auxiliary does not exist",
        ),
        ("attacker replay {run} --attack idlg", 1, "no case could be attacked"),
    ],
)
def test_wrong_usage_is_refused_with_advice(small_run: Path, command: str, status: int, words: str) -> None:
    result = call(command.format(run=small_run))
    assert (result.exit_code, type(result.exception)) == (status, SystemExit), result.output
    assert words in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands") / "run"
    sets = "--set rounds=1 --set data=digits --set training.batch_size=2 --set clients.count=2"
    result = call(f"fedsim run {ROOT}/deploy/experiments/photos.toml --engine local --out {folder} {sets}")
    assert result.exit_code == 0, result.output
    return folder
