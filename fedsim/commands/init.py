"""Command `fedsim init`, which writes a template: an experiment, or a Flower app that is recorded."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Annotated

import typer
from rich.markup import escape

from fedsim.commands.console import err, out, report_errors

TEMPLATE_FOLDER = Path(__file__).with_name("templates")
TEMPLATE_SUFFIX = "-tpl"
"""Suffix of templates of Python files, so that they are not modules of this package."""
EXPERIMENT_FILE = "experiment.toml"
DEFAULT_PATHS = {"imagefolder": "pictures", "csv": "table.csv"}
"""Dict from a kind of template to the default path of the user's data."""
TEMPLATE_KINDS = ("photos", "imagefolder", "csv", "flower", "quickstart")
FLOWER_SIZES = {"flower": 1, "quickstart": 32}
"""Dict from a Flower template to one number, which is both the examples per client and the batch size.

A single example is easy to reconstruct; 32 is the batch size of Flower's own quickstart app.
"""


def init(
    kind: Annotated[
        str,
        typer.Argument(
            help="photos: an experiment that runs as it is. imagefolder: one on your own pictures. csv: one on your own table. "
            "flower: a Flower app with the line that records it. quickstart: the same with batches of 32, as in Flower's "
            "quickstart."
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Folder to write to; by default the current one.")] = Path(),
    data: Annotated[
        Path | None, typer.Option(help="Path of your data for imagefolder and csv; by default pictures or table.csv.")
    ] = None,
) -> None:
    """Write a template of an experiment or of a Flower app, and print the commands to run next."""
    with report_errors():
        for path in write_starting_point(kind, folder, data):
            err.print(f"wrote {escape(str(path))}")
        if kind in FLOWER_SIZES:
            recorded = folder / "recorded"
            out.print(escape(f"flwr run {folder} local --stream"), soft_wrap=True)
            out.print(escape(f"attacker audit {folder}"), soft_wrap=True)
            out.print(escape(f"cd {folder}; attacker replay {recorded.name} --attack exact --model app.task:Net"), soft_wrap=True)
        else:
            out.print(escape(f"fedsim run {folder / EXPERIMENT_FILE} --out {folder / 'run'}"), soft_wrap=True)


def write_starting_point(kind: str, folder: Path, data: Path | None = None) -> list[Path]:
    """Write the files of a template to `folder` and return their paths.

    kind: one of `TEMPLATE_KINDS`. data: path of the user's data, which the template then names; only for the kinds in
    `DEFAULT_PATHS`, which have a default.
    Raises ValueError for an unknown kind or if `data` is given for another kind, and FileExistsError, before anything is written,
    if one of the files exists.
    """
    from fedsim.recording.safe_files import name_errors

    if kind not in TEMPLATE_KINDS:
        from defenses.registry import suggest_name

        raise ValueError(f"unknown template {kind!r}.{suggest_name(kind, TEMPLATE_KINDS)} Known: {', '.join(TEMPLATE_KINDS)}")
    if data is not None and kind not in DEFAULT_PATHS:
        raise ValueError(f"--data {data}: {kind} has its own data; give --data with {' or '.join(DEFAULT_PATHS)}")
    values = {"data": str(data or DEFAULT_PATHS.get(kind, "")), "recorded": str((folder / "recorded").absolute())}
    files = {folder / name: text for name, text in _read_templates(kind)}
    if there := [path for path in files if path.exists()]:
        raise FileExistsError(f"{there[0]} exists already; choose another folder")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".toml":
            text = Template(text).safe_substitute({key: json.dumps(value)[1:-1] for key, value in values.items()})
            if kind in FLOWER_SIZES:
                text = re.sub(r"^(examples|batch-size) = 1\b", rf"\1 = {FLOWER_SIZES[kind]}", text, flags=re.MULTILINE)
        with name_errors(path):
            path.write_text(text)
    return list(files)


def _read_templates(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the path, relative to the folder to write to, and the text of each file of a template."""
    at = TEMPLATE_FOLDER / ("flower" if kind in FLOWER_SIZES else kind)
    if not at.is_dir():
        yield EXPERIMENT_FILE, at.with_suffix(".toml").read_text()
        return
    for path in sorted(at.rglob("*")):
        if path.is_file() and path.suffix in (".toml", f".py{TEMPLATE_SUFFIX}"):
            yield str(path.relative_to(at)).removesuffix(TEMPLATE_SUFFIX), path.read_text()
