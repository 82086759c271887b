"""Pairs of original and reconstruction, and reconstructions alone, as pictures or table cells for a page."""

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from attacker.scoring.metrics import TABLE_TOLERANCE
from attacker.scoring.statistics import Floats
from fedsim.recording import Column, DamagedFile, DataSpec
from fedsim.recording.safe_files import parse_json, read_bytes, to_printable

MAX_BYTES = 64 * 2**20
"""Size of the largest file of a pair that is read."""
MAX_PIXELS = 20_000_000
SCORE_ADVICE = "score the run again to replace the file"


@dataclass(frozen=True)
class Picture:
    """The content of a PNG file; width and height in pixels."""

    png: bytes
    width: int
    height: int


@dataclass(frozen=True)
class TableCell:
    """One variable of a table row as text: a number in its own unit, or a category.

    column: name of the variable. original: None if it is not known. right: whether the reconstruction counts as correct: the
    right category, or an error of at most `TABLE_TOLERANCE` of the variable's range. `right` is None without an original, and if
    the original is a category that the table has no column for.
    """

    column: str
    reconstruction: str
    original: str | None = None
    right: bool | None = None


@dataclass(frozen=True)
class ExamplePair:
    """One example for a page: pictures of an image, or the cells of a table row. Parts that are not known are None or empty.

    problem: why the example cannot be shown; "" if there is no problem.
    """

    original: Picture | None = None
    reconstruction: Picture | None = None
    cells: tuple[TableCell, ...] = ()
    problem: str = ""


def read_pair(run: Path, file: str, columns: Sequence[Column]) -> ExamplePair:
    """Read the pair in `file`, relative to `run`: a PNG with the original on the left, or a table row as JSON.

    columns: the table's columns, with their units and categories. If their names differ from the names in the file, each value is
    shown as a plain number. A file that is missing, cannot be read or lies outside the run gives a pair with only a `problem`.
    """
    if not {"", ".", ".."}.isdisjoint(file.split("/")):
        return ExamplePair(problem=f"{file} lies outside the run")
    if not os.path.lexists(run / file):
        return ExamplePair(problem=f"{file} is missing")
    try:
        content = read_bytes(run, file, limit=MAX_BYTES)
        return _parse_row(content, columns) if file.endswith(".json") else _split_halves(content)
    except DamagedFile as error:
        return ExamplePair(problem=f"{file} {error.reason}")
    except ValueError as error:
        return ExamplePair(problem=f"{file} cannot be read: {to_printable(str(error)[:300])}")
    except (OSError, KeyError, TypeError, SyntaxError, Image.DecompressionBombError):
        return ExamplePair(problem=f"{file} cannot be read; {SCORE_ADVICE}")


def read_pair_tensors(run: Path, file: str) -> tuple[Tensor, Tensor]:
    """Read original and reconstruction of a pair: images (C, H, W) in [0, 1], rounded to 8 bits, or table rows (F,).

    Raises ValueError if the file cannot be read.
    """
    pair = read_pair(run, file, ())
    if pair.problem:
        raise ValueError(pair.problem)
    if pair.original is None or pair.reconstruction is None:
        content = parse_json(read_bytes(run, file, limit=MAX_BYTES))
        return torch.tensor(content["original"]), torch.tensor(content["reconstruction"])
    return _decode_picture(pair.original), _decode_picture(pair.reconstruction)


def _decode_picture(picture: Picture) -> Tensor:
    with Image.open(io.BytesIO(picture.png)) as image:
        pixels = torch.from_numpy(np.array(image, dtype=np.float32)) / 255
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def show_alone(x: Tensor, data: DataSpec) -> ExamplePair:
    """Return a reconstruction x of shape `data.shape` in the form in which pages show it, without an original.

    Pixels and continuous columns are clamped to [0, 1], and NaN is taken as 0. An image that has not 1 or 3 channels gives only a
    `problem`.
    """
    x = x.nan_to_num()
    if not data.is_image:
        columns = data.columns or tuple(Column(name=f"column {i}") for i in range(len(x)))
        return ExamplePair(cells=tuple(_make_cells(columns, x.tolist())))
    if len(x) not in (1, 3):
        return ExamplePair(problem=f"an image of {len(x)} channels cannot be shown")
    pixels = (x.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return ExamplePair(reconstruction=_encode_picture(Image.fromarray(pixels[0] if len(x) == 1 else pixels.transpose(1, 2, 0))))


def _split_halves(content: bytes) -> ExamplePair:
    with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(
                f"the picture has {image.width} x {image.height} pixels, more than the limit of {MAX_PIXELS} in all; "
                f"{SCORE_ADVICE}"
            )
        middle = image.width // 2
        left = image.crop((0, 0, middle, image.height))
        right = image.crop((middle, 0, image.width, image.height))
    return ExamplePair(_encode_picture(left), _encode_picture(right))


def _encode_picture(image: Image.Image) -> Picture:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return Picture(buffer.getvalue(), image.width, image.height)


def _parse_row(text: bytes, columns: Sequence[Column]) -> ExamplePair:
    content = parse_json(text)
    names, original, reconstruction = (content[key] for key in ("columns", "original", "reconstruction"))
    if not len(names) == len(original) == len(reconstruction):
        raise ValueError(
            f"the table row has {len(names)} names of columns, {len(original)} original and {len(reconstruction)} reconstructed "
            f"values, but these three numbers must be equal; {SCORE_ADVICE}"
        )
    if names != [column.name for column in columns]:
        columns = [Column(name=name) for name in names]
    return ExamplePair(cells=tuple(_make_cells(columns, reconstruction, original)))


def _make_cells(
    columns: Sequence[Column], recovered: Sequence[float], original: Sequence[float] | None = None
) -> Iterator[TableCell]:
    """Yield one cell per variable: a continuous column, or the adjacent one-hot columns of a categorical variable.

    recovered, original: reconstruction and original, one value per column, in [0, 1] for continuous columns. In these columns,
    `recovered` is clamped to [0, 1].
    """
    numbered = groupby(
        enumerate(columns), key=lambda pair: (pair[1].kind, pair[1].name, pair[0] * (pair[1].kind == "continuous"))
    )
    x, truth = np.asarray(recovered, dtype=float), None if original is None else np.asarray(original, dtype=float)
    for (kind, name, _), group in numbered:
        at = [i for i, _ in group]
        cell = _make_categorical_cell if kind == "categorical" else _make_continuous_cell
        yield cell(name, [columns[i] for i in at], x[at], None if truth is None else truth[at])


def _make_continuous_cell(name: str, columns: Sequence[Column], x: Floats, truth: Floats | None) -> TableCell:
    low, span = columns[0].low, columns[0].high - columns[0].low
    x = x.clip(0, 1)
    shown = f"{low + x[0] * span:.4g}"
    if truth is None:
        return TableCell(name, shown)
    return TableCell(name, shown, f"{low + truth[0] * span:.4g}", bool(abs(x[0] - truth[0]) <= TABLE_TOLERANCE))


def _make_categorical_cell(name: str, columns: Sequence[Column], x: Floats, truth: Floats | None) -> TableCell:
    largest = [column.category or f"value {i}" for i, column in enumerate(columns) if x[i] == x.max()]
    shown = " or ".join(largest) if len(largest) <= 3 else "undecided"
    if truth is None:
        return TableCell(name, shown)
    if truth.max() <= 0:
        return TableCell(name, shown, "one that training never saw")
    true = columns[int(truth.argmax())].category or f"value {int(truth.argmax())}"
    return TableCell(name, shown, true, largest == [true])
