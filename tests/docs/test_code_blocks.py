"""Code blocks of README and documentation are run, with fewer steps where a page says so; TOML and JSON are parsed."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import setups
from code_blocks import LANGUAGES, PAGES, PROGRAMS, ROOT, Block, blocks, check_options
from shell import Shell
from started_service import StartedService
from typer.testing import CliRunner

from attacker.service import rules
from defenses.registry import references
from fedsim.config.experiment import Experiment, read, validate
from fedsim.models import building

NAMED = [str(page.relative_to(ROOT)) for page in PAGES]
GATE = ("test", "test-page", "test-deploy")
"""Targets of make that the gate makes."""
CHECKS = ("pytest", "ruff", "mypy", "lint-imports")
DEPLOYMENT_TEST = "tests/docs/test_deployment_commands.py"
MAX_NOT_RUN = 3
"""Maximal number of blocks that no test runs: one installs this project, as the Makefile does, one needs Docker, and one starts a
SuperLink on a port that all simulations of the computer share."""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[setups.Page]:
    """An empty folder with a copy of `deploy` and a virtual environment; paths, modules and threads are restored."""
    folder = tmp_path / "page"
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(building, "_ADMITTED", {})
    monkeypatch.setenv(references.CODE_VARIABLE, "")  # code that the page's commands admit is forgotten afterwards
    before = set(sys.modules)
    yield setups.Page(folder=folder, names={"__name__": "page"}, monkeypatch=monkeypatch, service=StartedService(monkeypatch))
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(folder):
            del sys.modules[name]


@pytest.mark.parametrize("path", PAGES[1:], ids=NAMED[1:])
def test_every_block_of_a_page_does_what_it_shows(path: Path, page: setups.Page) -> None:
    run_page(path, page)


def test_the_readmes_steps_lead_to_a_report_and_repeating_them_does_nothing(page: setups.Page) -> None:
    run_page(ROOT / "README.md", page)
    assert (page.folder / "runs" / "first" / "report.html").stat().st_size > 100_000
    run = [words for block in blocks(ROOT / "README.md") if block.language == "bash" for words in block.commands()]
    replay = next(words for words in run if words[:2] == ["attacker", "replay"])
    result = CliRunner().invoke(PROGRAMS["attacker"], [*replay[1:], "--set", "steps=2", "--json"])
    assert [(part["done"], part["skipped"]) for part in json.loads(result.stdout)] == [(0, 8), (0, 8)]


def test_blocks_that_are_not_run_are_few_and_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    found = [(name, block) for name, path in zip(NAMED, PAGES, strict=True) for block in blocks(path)]
    left_out = [f"{name}:{block.line}: {block.reason}" for name, block in found if block.reason]
    with capsys.disabled():
        print("", f"code blocks: {len(found)}, not run: {len(left_out)}", *left_out, sep="\n")
    assert len(left_out) <= MAX_NOT_RUN
    for line in left_out:
        for test in re.findall(r"tests/[\w./]+", line):
            assert (ROOT / test).exists(), line


def run_page(path: Path, page: setups.Page) -> None:
    current: list[Block] = []

    def call(words: list[str], folder: Path) -> tuple[int, str]:
        os.chdir(folder)
        try:
            return call_program(words, current[-1], page.service)
        finally:
            os.chdir(page.folder)

    try:
        with Shell(page.folder, [*PROGRAMS, "curl", "make", *CHECKS], call) as shell:
            for block in blocks(path):
                where = f"{path.relative_to(ROOT)}:{block.line}"
                assert block.language in LANGUAGES, f"{where}: say which language this is, one of {', '.join(LANGUAGES)}"
                assert block.language == "bash" or not block.reason, f"{where}: only shell blocks may be left out"
                assert block.elsewhere in ("", DEPLOYMENT_TEST), f"{where}: {block.elsewhere} runs no blocks"
                for name in block.setups:
                    getattr(setups, name)(page)
                current.append(block)
                RUNNERS[block.language](block, where, page, shell)
    finally:
        page.service.stop()


def call_program(words: list[str], block: Block, service: StartedService) -> tuple[int, str]:
    """Run a command of a page in this process; returns its exit status, or 0 for the one that the page expects, and stdout."""
    words = [*words, *block.list_added_options(words)]
    if words[0] == "curl":
        return service.ask(words)
    if words[0] in CHECKS:
        return (0, "") if is_part_of_gate(words) else (1, "")
    if words[0] == "make":
        return make_targets(words[1:], block, service)
    if words[:2] == ["attacker", "serve"]:
        return service.start(words[1:])
    result = CliRunner().invoke(PROGRAMS[words[0]], words[1:])
    if result.exit_code == 0:
        return 0, result.stdout
    return (0 if result.exit_code == block.status else result.exit_code), result.output


def make_targets(targets: list[str], block: Block, service: StartedService) -> tuple[int, str]:
    """Run what make would run for the targets, unless all of it is part of the gate, which would then run itself."""
    recipes = read_recipes(*targets)
    if list_programs(recipes) <= list_programs(read_recipes(*GATE)):
        return 0, ""
    called = [shlex.split(line) for line in re.findall(r"^\.venv/bin/(.*)$", recipes, re.MULTILINE)]
    failed = [done for words in called if words[0] in PROGRAMS for done in [call_program(words, block, service)] if done[0]]
    return failed[0] if failed else (0, "")


def is_part_of_gate(words: list[str]) -> bool:
    """Return whether the gate runs the program of this command, and all files that the command names are there."""
    files = [word for word in words[1:] if word.endswith(".py")]
    return words[0] in list_programs(read_recipes(*GATE)) and all((ROOT / file).exists() for file in files)


@cache
def read_recipes(*targets: str) -> str:
    """Return the commands that make would run for the targets. Raises subprocess.CalledProcessError for an unknown target."""
    environment = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", "--dry-run", *targets], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout


def list_programs(recipes: str) -> set[str]:
    """Return the names of the programs of the virtual environment in the commands, without Python itself."""
    return set(re.findall(r"\.venv/bin/([\w-]+)", recipes)) - {"python"}


def run_shell_block(block: Block, where: str, page: setups.Page, shell: Shell) -> None:
    for words in block.commands():
        if words[0] in PROGRAMS and (block.reason or block.elsewhere):
            try:
                check_options(words)
            except click.UsageError as error:
                pytest.fail(f"{where}: {' '.join(words)}: {error.format_message()}")
    if not block.reason and not block.elsewhere:
        code = re.sub("|".join(page.replaced) or "$^", lambda found: page.replaced[found[0]], block.code)
        failed = shell.run(code)
        assert not failed, f"{where}: {failed}"


def run_python_block(block: Block, where: str, page: setups.Page, shell: Shell) -> None:
    code = compile(block.code, where, "exec")
    if block.title:
        Path(block.title).write_text(block.code)
        importlib.invalidate_caches()
    else:
        exec(code, page.names)


def run_toml_block(block: Block, where: str, page: setups.Page, shell: Shell) -> None:
    """Check the keys of an experiment, a rule or an entry point as the programs do; write a file that a title names."""
    keys = tomllib.loads(block.code)
    Path(block.title or "block.toml").write_text(block.code)
    if keys.keys() <= Experiment.model_fields.keys():
        base = read(ROOT / "deploy" / "experiments" / "photos.toml")
        validate({**tomllib.loads(base.to_toml()), **keys}, source=where)
    elif "rule" in keys:
        assert rules.read(Path("block.toml"))
    else:
        for group in keys["project"]["entry-points"].values():
            for reference in group.values():
                module, _, name = reference.partition(":")
                assert hasattr(importlib.import_module(module), name), f"{where}: {reference}"


def parse_json_block(block: Block, where: str, page: setups.Page, shell: Shell) -> None:
    json.loads(block.code)


def skip_text_block(block: Block, where: str, page: setups.Page, shell: Shell) -> None:
    """Do nothing: a block of text has no code."""


RUNNERS: dict[str, Callable[[Block, str, setups.Page, Shell], Any]] = {
    "bash": run_shell_block,
    "python": run_python_block,
    "toml": run_toml_block,
    "json": parse_json_block,
    "text": skip_text_block,
}


def test_blocks_are_found_and_a_wrong_command_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- check: setup recorded; fedsim run --set rounds=1; status 4 -->\n```bash\nfedsim run a.toml \\\n    --out b && "
        'fedsim show b  # words\n```\n\n- item\n\n  ```python title="task.py"\n  x = 1\n  ```\n\n'
        "<!-- check: not run: needs Docker -->\n```bash\ndocker compose build\n```\n"
    )
    first, second, third = blocks(page)
    assert list(first.commands()) == [["fedsim", "run", "a.toml", "--out", "b"], ["fedsim", "show", "b"]]
    assert first.list_added_options(["fedsim", "run", "a.toml"]) == ["--set", "rounds=1"]
    assert first.list_added_options(["fedsim", "show"]) == []
    assert (first.setups, first.status, first.reason) == (["recorded"], 4, "")
    assert (second.title, second.code) == ("task.py", "x = 1\n")
    assert (third.reason, third.setups) == ("needs Docker", [])
    check_options(["fedsim", "run", "a.toml", "--out", "b"])
    for wrong in (
        "fedsim rnu a.toml",
        "fedsim run",
        "fedsim run a.toml --otu b",
        "attacker replay runs --attack",
        "attacker score",
    ):
        with pytest.raises(click.UsageError):
            check_options(wrong.split())


def test_a_shell_keeps_its_state_and_reports_failed_commands(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    called: list[tuple[list[str], Path]] = []

    def call(words: list[str], folder: Path) -> tuple[int, str]:
        called.append((words, folder))
        return int(words[1] == "bad"), "shown\n"

    with Shell(tmp_path / "page", ["fedsim"], call) as shell:
        assert shell.run("mkdir sub && cd sub\nNAME='a  b'") == []
        assert shell.run('fedsim run "$NAME" > out && [ "$(cat out)" = shown ]') == []
        assert called == [(["fedsim", "run", "a  b"], tmp_path / "page" / "sub")]
        assert shell.run("fedsim ok || fedsim bad || true") == []
        (failed,) = shell.run("fedsim bad\nls nowhere && echo no\nfedsim ok")
        assert failed.startswith("fedsim bad")
        (failed,) = shell.run("ls nowhere\ntrue")
        assert "No such file" in failed
        (failed,) = shell.run("exit 3")
        assert "the shell ended" in failed
