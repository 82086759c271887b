"""Code blocks of README and documentation are run, with fewer steps where a page says so; TOML and JSON are parsed."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from code_blocks import LANGUAGES, PAGES, PROGRAMS, ROOT, Block, blocks, check_options
from typer.testing import CliRunner

from defenses._registry import references
from fedsim.config.experiment import Experiment, read, validate
from fedsim.models import building

NAMED = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a page, with the experiments that its commands name; afterwards all is as it was."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(building, "_ADMITTED", {})
    monkeypatch.setenv(references.CODE_VARIABLE, "")  # code that the page's commands admit is forgotten afterwards
    threads, before = torch.get_num_threads(), set(sys.modules)
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES[1:], ids=NAMED[1:])
def test_every_block_of_a_page_does_what_it_shows(page: Path, folder: Path) -> None:
    _run(page)


def test_the_readmes_steps_lead_to_a_report_and_repeating_them_does_nothing(folder: Path) -> None:
    _run(ROOT / "README.md")
    assert (folder / "runs" / "first" / "report.html").stat().st_size > 100_000
    run = [
        words for block in blocks(ROOT / "README.md") if block.language == "bash" and block.is_run for words in block.commands()
    ]
    replay = next(words for words in run if words[:2] == ["attacker", "replay"])
    told = CliRunner().invoke(PROGRAMS["attacker"], [*replay[1:], "--set", "steps=2", "--json"])
    assert [(part["done"], part["skipped"]) for part in json.loads(told.stdout)] == [(0, 8), (0, 8)]


def _run(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: say which language this is, one of {', '.join(LANGUAGES)}"
        if block.language == "bash":
            _bash(block, where)
        elif block.language == "toml":
            _toml(block, where)
        elif block.language == "json":
            json.loads(block.code)
        elif block.language == "python":
            code = compile(block.code, where, "exec")
            if block.title:
                Path(block.title).write_text(block.code)
            elif block.is_run:
                exec(code, names)


def _bash(block: Block, where: str) -> None:
    syntax = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True)
    assert syntax.returncode == 0, f"{where}: {syntax.stderr}"
    for words in block.commands():
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"{where}: no target {words[1]}"
        if words[0] not in PROGRAMS:
            continue
        if not block.is_run:
            try:
                check_options(words)
            except click.UsageError as error:
                pytest.fail(f"{where}: {' '.join(words)}: {error.format_message()}")
            continue
        told = CliRunner().invoke(PROGRAMS[words[0]], [*words[1:], *block.added(words)])
        assert told.exit_code == 0, f"{where}: {' '.join(words)}\n{told.output}"


def _toml(block: Block, where: str) -> None:
    """Keys of an experiment are checked as `fedsim run` does; a file that a title names is written."""
    keys = tomllib.loads(block.code)
    if keys.keys() <= Experiment.model_fields.keys():
        base = read(ROOT / "deploy" / "experiments" / "photos.toml")
        validate({**tomllib.loads(base.to_toml()), **keys}, source=where)
    if block.title:
        Path(block.title).write_text(block.code)


def test_blocks_are_found_and_a_wrong_command_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- check: fedsim run --set rounds=1 -->\n```bash\nfedsim run a.toml \\\n    --out b && fedsim show b  # words\n```\n"
        '\n- item\n\n  ```python title="task.py"\n  x = 1\n  ```\n'
    )
    first, second = blocks(page)
    assert list(first.commands()) == [["fedsim", "run", "a.toml", "--out", "b"], ["fedsim", "show", "b"]]
    assert first.added(["fedsim", "run", "a.toml"]) == ["--set", "rounds=1"]
    assert first.added(["fedsim", "show"]) == []
    assert (second.title, second.code) == ("task.py", "x = 1\n")
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
