"""Original and reconstruction of one example, as scoring wrote them side by side."""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from fedsim.wire import Column


@dataclass(frozen=True)
class Picture:
    """A PNG file; width and height in pixels."""

    png: bytes
    width: int
    height: int


@dataclass(frozen=True)
class Cell:
    """One column of a table row, in the column's own unit."""

    column: str
    original: float
    reconstruction: float


@dataclass(frozen=True)
class Pair:
    """What there is to show of one example; nothing where `problem` says why not."""

    original: Picture | None = None
    reconstruction: Picture | None = None
    cells: tuple[Cell, ...] = ()
    problem: str = ""


def read_pair(run: Path, file: str, columns: Mapping[str, Column]) -> Pair:
    """The pair in `file`, relative to `run`: a PNG with the original left, or a table row as JSON."""
    path = run / file
    try:
        if not path.resolve().is_relative_to(run.resolve()):
            return Pair(problem=f"{file} lies outside the run")
        return _cells(path, columns) if path.suffix == ".json" else _halves(path)
    except FileNotFoundError:
        return Pair(problem=f"{file} is missing")
    except (OSError, ValueError, KeyError, UnidentifiedImageError):
        return Pair(problem=f"{file} cannot be read")


def _halves(path: Path) -> Pair:
    with Image.open(path) as image:
        middle = image.width // 2
        left = image.crop((0, 0, middle, image.height))
        right = image.crop((middle, 0, image.width, image.height))
    return Pair(_picture(left), _picture(right))


def _picture(image: Image.Image) -> Picture:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return Picture(buffer.getvalue(), image.width, image.height)


def _cells(path: Path, columns: Mapping[str, Column]) -> Pair:
    content = json.loads(path.read_text())
    values = zip(content["columns"], content["original"], content["reconstruction"], strict=True)
    return Pair(cells=tuple(_cell(columns.get(name) or Column(name=name), x, found) for name, x, found in values))


def _cell(column: Column, original: float, reconstruction: float) -> Cell:
    span = column.high - column.low
    return Cell(column.name, column.low + original * span, column.low + reconstruction * span)
