"""Fenced code blocks of the README and the documentation, and what the tests do with each.

The blocks of a page run one after the other: shell blocks in one shell, Python blocks in one namespace, all in one empty folder
with a copy of `deploy`. A Python or TOML block with a title, such as ```python title="task.py", is a file of that name. An HTML
comment in the line above a block changes how it runs. Its parts are separated by semicolons:

    <!-- check: not run: REASON -->      not run; the options of its commands are checked, and the tests list it with the reason
    <!-- check: run by TEST -->          run by this test, with other addresses and paths; the options are checked here as well
    <!-- check: setup NAME -->           call the function NAME of tests/docs/setups.py first, which prepares files
    <!-- check: fedsim run --set x=1 --> add these options to commands that begin with these two words
    <!-- check: status 4 -->             the block's last command ends with this exit status
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import typer.main

from attacker.cli import app as attacker
from fedsim.cli import app as fedsim

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "results" not in page.relative_to(ROOT).parts),
)
NOT_RUN, RUN_BY = "not run:", "run by"
LANGUAGES = ("python", "bash", "toml", "json", "text")
PROGRAMS = {"fedsim": fedsim, "attacker": attacker}
_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- check: (?P<check>[^\n]*?) -->\n(?P=indent))?(?P<fence>```+)(?P<language>\w*)"
    r'(?: title="(?P<title>[\w.]+)")?\n(?P<code>.*?)^(?P=indent)(?P=fence) *$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block. line: where it begins in its page. check: what the comment above it says. title: name of a file."""

    line: int
    language: str
    code: str
    check: str = ""
    title: str = ""

    @property
    def reason(self) -> str:
        """Why the block is not run; empty if it is."""
        return self.check.removeprefix(NOT_RUN).strip() if self.check.startswith(NOT_RUN) else ""

    @property
    def elsewhere(self) -> str:
        """Path of the test that runs the block; empty if it runs with its page."""
        return self.check.removeprefix(RUN_BY).strip() if self.check.startswith(RUN_BY) else ""

    @property
    def setups(self) -> list[str]:
        """Names of the functions that prepare what the block needs."""
        return [name for part in self._parts() if part[0] == "setup" for name in part[1:]]

    @property
    def status(self) -> int:
        """Exit status of the last command."""
        return next((int(part[1]) for part in self._parts() if part[0] == "status"), 0)

    def list_added_options(self, words: list[str]) -> list[str]:
        """Return the options that the comment adds to a command."""
        return next((part[2:] for part in self._parts() if part[:2] == words[:2]), [])

    def _parts(self) -> list[list[str]]:
        parts = [] if self.reason or self.elsewhere else [shlex.split(part) for part in self.check.split(";") if part.strip()]
        for part in parts:
            assert part[0] in ("setup", "status", *PROGRAMS), f"unknown {part[0]!r} in {self.check!r}; see CONTRIBUTING.md"
        return parts

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each command, without comments; lines that end in a backslash are joined."""
        for line in re.sub(r"\\\n *", " ", self.code).splitlines():
            words = shlex.split(line, comments=True)
            while "&&" in words:
                at = words.index("&&")
                yield words[:at]
                words = words[at + 1 :]
            if words:
                yield words


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        indent = match["indent"]
        code = "".join(line.removeprefix(indent) for line in match["code"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start()) + 1
        about = {name: match[name] or "" for name in ("language", "check", "title")}
        found.append(Block(line=line, code=code, **about))
    return found


def check_options(words: list[str]) -> None:
    """Read the options of a command as its command line does, and start nothing.

    Raises click.UsageError for an unknown command or option, and for an argument that is missing or too many.
    """
    program, name, *rest = words if len(words) > 1 else [*words, ""]
    group = typer.main.get_command(PROGRAMS[program])
    assert isinstance(group, click.Group)
    if name in ("", "--help"):
        return
    context = click.Context(group, info_name=program)
    command = group.get_command(context, name)
    if command is None:
        raise click.UsageError(f"{program} has no command {name!r}")
    if "--help" in rest:
        return
    inner = click.Context(command, info_name=name, parent=context)
    given, extra, _ = command.make_parser(inner).parse_args(list(rest))
    if extra:
        raise click.UsageError(f"{program} {name} takes no argument {extra[0]!r}")
    for parameter in command.params:
        value = given.get(parameter.name or "")
        if parameter.required and (value is None or value == () or repr(value) == "Sentinel.UNSET"):
            raise click.UsageError(f"{program} {name} needs {parameter.name}")
