"""`fedsim init`: a starting point, an experiment or a recorded Flower app, to be changed by its user."""

import json
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Annotated

import typer
from rich.markup import escape

from fedsim.commands.console import err, out, report_errors

TEMPLATES = Path(__file__).with_name("templates")
SUFFIX = "-tpl"
"""End of the names of templates of Python files, which are no modules of this package."""
EXPERIMENT = "experiment.toml"
DATA = {"imagefolder": "pictures", "csv": "table.csv"}
"""Where one's own data lie by default, by the kind of starting point that has any."""
KINDS = ("photos", "imagefolder", "csv", "flower")


def init(
    kind: Annotated[
        str,
        typer.Argument(
            help="photos: an experiment that runs at once. imagefolder: on your own pictures. csv: on your own table. "
            "flower: a Flower app with the line that records it."
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Folder to write to; by default this one.")] = Path(),
    data: Annotated[
        Path | None, typer.Option(help="Of imagefolder and csv, where your data are; by default pictures or table.csv.")
    ] = None,
) -> None:
    """Write a starting point, and say what to run next."""
    with report_errors():
        for path in write_starting_point(kind, folder, data):
            err.print(f"wrote {escape(str(path))}")
        if kind == "flower":
            recorded = folder / "recorded"
            out.print(escape(f"flwr run {folder} local --stream"), soft_wrap=True)
            out.print(escape(f"cd {folder}; attacker replay {recorded.name} --attack exact --model app.task:Net"), soft_wrap=True)
        else:
            out.print(escape(f"fedsim run {folder / EXPERIMENT} --out {folder / 'run'}"), soft_wrap=True)


def write_starting_point(kind: str, folder: Path, data: Path | None = None) -> list[Path]:
    """Write the files of a kind of starting point and return their paths.

    Raises ValueError for an unknown kind, and FileExistsError, before anything is written, where a file is there already.
    """
    if kind not in KINDS:
        from defenses._registry import suggest

        raise ValueError(f"unknown starting point {kind!r}.{suggest(kind, KINDS)} Known: {', '.join(KINDS)}")
    if data is not None and kind not in DATA:
        raise ValueError(f"--data {data}: {kind} has its own data; give --data with {' or '.join(DATA)}")
    values = {"data": str(data or DATA.get(kind, "")), "recorded": str((folder / "recorded").absolute())}
    files = {folder / name: text for name, text in _read_templates(kind)}
    if there := [path for path in files if path.exists()]:
        raise FileExistsError(f"{there[0]} exists already; choose another folder")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".toml":
            text = Template(text).safe_substitute({key: json.dumps(value)[1:-1] for key, value in values.items()})
        path.write_text(text)
    return list(files)


def _read_templates(kind: str) -> Iterator[tuple[str, str]]:
    """Names below the folder that is written, and texts."""
    at = TEMPLATES / kind
    if not at.is_dir():
        yield EXPERIMENT, at.with_suffix(".toml").read_text()
        return
    for path in sorted(at.rglob("*")):
        if path.is_file() and path.suffix in (".toml", f".py{SUFFIX}"):
            yield str(path.relative_to(at)).removesuffix(SUFFIX), path.read_text()
