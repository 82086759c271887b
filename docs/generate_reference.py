"""Write the reference pages that repeat what the code says: docs/commands.md and docs/names.md.

`make reference` runs this; a test fails where the pages differ from what it would write.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer.main
from typer.testing import CliRunner

from attacker.cli import app as attacker
from fedsim.cli import app as fedsim

DOCS_FOLDER = Path(__file__).parent
REGISTRY_KINDS = ("models", "datasets", "partitions", "strategies", "defenses", "gradients", "networks", "inputs")
CLI_PROGRAMS = {"fedsim": fedsim, "attacker": attacker}
EXAMPLE_CHECKS = {
    "fedsim init": "setup pictures",
    "fedsim run": "fedsim run --engine local --set rounds=1",
    "fedsim delete": "setup recorded",
    "fedsim import": "setup state_dicts",
    "fedsim split": "setup no_federation",
    "fedsim part": "setup public_facts own_images",
    "fedsim keys": "setup no_federation",
    "fedsim start": "run by tests/docs/test_deployment_commands.py",
    "fedsim enrol": "run by tests/docs/test_deployment_commands.py",
    "attacker audit": "setup recorded; status 4; attacker audit --budget 1s",
    "attacker replay": "attacker replay --set steps=2 --workers 1",
    "attacker report": "setup scored",
    "attacker rank": "attacker rank --input 3x16x16",
    "attacker serve": "attacker serve --no-stand-by",
    "attacker train-prior": "setup photographs; attacker train-prior --size 32 --steps 2 --batch 2 --width 4 --device cpu",
    "attacker sweep": "setup small_grid; attacker sweep --workers 1",
    "attacker demo": "setup short_demo; attacker demo --engine local",
}
"""How the tests run the example of a command; see tests/docs/code_blocks.py. Without an entry it runs as it is."""
CODE_WORDS = {
    "fedsim": (
        "`fedsim run`, `prepare` and `split` import the code that your experiment names. `show` and `verify` read a "
        "recording; for one with a defense of your own, put `--code module:KIND` before the command: `fedsim --code "
        "module:KIND show RUN`."
    ),
    "attacker": (
        "`replay`, `score` and `report` need `--code` for a defense of your own that the recording names, and `score` "
        "for a data set of your own that the truth names as well: `attacker --code module:KIND --code module:function "
        "score RUN`. `serve` needs it for all code that its recordings or jobs name. A network is named by `replay "
        "--model`, an attack by `--attack`, a decoder by `--set decoder=`; these need no `--code`. Names of installed "
        "packages (entry points) need none at all."
    ),
}


def pages() -> dict[Path, str]:
    """Return a dict from the file of each generated page to its text."""
    return {DOCS_FOLDER / "commands.md": _commands(), DOCS_FOLDER / "names.md": _names()}


def _commands() -> str:
    lines = ["# Commands", "", "This page is generated from the command lines by `make reference`.", ""]
    for program, app in CLI_PROGRAMS.items():
        group = typer.main.get_command(app)
        assert isinstance(group, click.Group)
        lines += [f"## {program}", "", _plain(group.help), "", *_global_options(program, group), "| command | |", "|---|---|"]
        lines += [
            f"| [`{program} {name}`](#{program}-{name}) | {_cell(_plain(command.help).partition(chr(10))[0])} |"
            for name, command in group.commands.items()
        ]
        lines.append("")
        for name, command in group.commands.items():
            lines += _command(program, name, command)
    return "\n".join(lines).rstrip() + "\n"


def _global_options(program: str, group: click.Group) -> Iterator[str]:
    """Yield the table of the options that stand before the command, and what `--code` is for."""
    own = [one for one in group.params if not {"--install-completion", "--show-completion"} & set(one.opts)]
    yield "| option before the command | default | |"
    yield "|---|---|---|"
    yield from filter(None, map(_parameter, own))
    yield ""
    yield CODE_WORDS[program]
    yield ""


def _command(program: str, name: str, command: click.Command) -> Iterator[str]:
    yield f"### {program} {name}"
    yield ""
    yield _plain(command.help)
    yield ""
    if command.epilog:
        if how := EXAMPLE_CHECKS.get(f"{program} {name}"):
            yield f"<!-- check: {how} -->"
        yield "```bash"
        yield _plain(command.epilog).removeprefix("Example:").strip()
        yield "```"
        yield ""
    rows = [row for parameter in command.params if (row := _parameter(parameter)) is not None]
    if rows:
        yield "| argument or option | default | |"
        yield "|---|---|---|"
        yield from rows
        yield ""


def _parameter(parameter: click.Parameter) -> str | None:
    words = _cell(_plain(getattr(parameter, "help", None)))
    if isinstance(parameter, click.Option):
        metavar = "" if parameter.is_flag else f" {parameter.metavar or parameter.type.name.upper()}"
        named = ", ".join(f"`{option}{metavar}`" for option in [*parameter.opts, *parameter.secondary_opts])
    else:
        named = f"`{(parameter.metavar or parameter.name or '').upper()}`" + (" ..." if parameter.nargs == -1 else "")
    default = parameter.default
    shown = "" if default is None or default is False or callable(default) or "UNSET" in repr(default) else f"`{default}`"
    return f"| {named} | {'required' if parameter.required else shown} | {words} |"


def _names() -> str:
    lines = [
        "# Names",
        "",
        "What an experiment or a command can name. This page is generated from the code by `make reference`; `fedsim list` and",
        "`attacker list` print the same, with what installed packages add.",
        "",
    ]
    for kind in REGISTRY_KINDS:
        lines += [f"## {kind.capitalize()}", "", "| name | | arguments | source |", "|---|---|---|---|"]
        for name, told in _said(fedsim, "list", kind).items():
            arguments = f"`{told['arguments']}`" if told["arguments"] else ""
            lines.append(f"| `{name}` | {_cell(told['summary'])} | {_cell(arguments)} | {_cell(told['reference'])} |")
        lines.append("")
    lines += ["## Attacks", ""]
    for attack in _said(attacker, "list"):
        lines += [f"### {attack['name']}", "", attack["summary"], "", f"Needs: {', '.join(attack['needs'])}.", ""]
        lines += ["| argument | default | published | tuned |", "|---|---|---|---|"]
        presets = attack["presets"]
        for name, default in attack["arguments"].items():
            published = presets.get("published", {}).get(name)
            tuned = {family: own[name] for family, own in presets.get("tuned", {}).items() if name in own}
            cells = [f"`{default!r}`", "" if published is None else f"`{published!r}`"]
            cells.append(", ".join(f"{family} `{value!r}`" for family, value in tuned.items()))
            lines.append(f"| `{name}` | {' | '.join(map(_cell, cells))} |")
        lines.append("")
    lines += ["## Decoders", "", "Values of the argument `decoder` of `cpl`, `inverting_gradients` and `rog`.", ""]
    lines += ["| name | |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(words)} |" for name, words in _said(attacker, "list", "decoders").items()]
    lines += [
        "",
        "## Enhancers",
        "",
        "Values of the argument `enhancer` of `rog`, besides `none`.",
        "",
        "| name | |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {_cell(words)} |" for name, words in _said(attacker, "list", "enhancers").items()]
    return "\n".join(lines).rstrip() + "\n"


def _said(app: typer.Typer, *words: str) -> Any:
    """Return what a command of a program prints with --json, parsed. Raises RuntimeError if it fails."""
    told = CliRunner().invoke(app, [*words, "--json"])
    if told.exit_code:
        raise RuntimeError(f"{' '.join(words)} failed: {told.output}")
    return json.loads(told.stdout)


def _plain(text: str | None) -> str:
    """Return a help text without rich's markup and with each paragraph on one line; "" for None."""
    unmarked = re.sub(r"\[/?(?:bold|dim|red|green|yellow)[^\]]*\]", "", (text or "").replace("\b", ""))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in unmarked.split("\n\n")).strip()


def _cell(text: str) -> str:
    """Return a text on one line, with `|` escaped, for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
        print(path)
