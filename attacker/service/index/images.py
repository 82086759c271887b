"""Images and table rows to show, of reconstructions and of their originals, read from untrusted files."""

import io
from collections.abc import Sequence
from pathlib import Path
from struct import error as StructError
from typing import NamedTuple

from PIL import Image

from attacker.report.pairs import SCORE_ADVICE, ExamplePair, read_pair, show_alone
from attacker.service.index.json_lines import ShownScore
from attacker.service.index.reconstruction_files import REPLACE_ADVICE, WholeReconstruction, read_example
from attacker.service.index.recording_index import format_error
from fedsim.recording import DamagedFile, DataSpec
from fedsim.recording.safe_files import read_bytes

MAX_BYTES = 64 * 2**20
MAX_ROWS = 200
"""Largest number of table rows of one case that are shown."""


class NoImage(ValueError):
    """Raised if there is no image to show; the message states the reason."""


class PicturePair(NamedTuple):
    """Original and reconstruction of one example, each as the content of a PNG file."""

    original: bytes
    reconstruction: bytes


def encode_reconstruction(run: Path, file: str, number: int, data: DataSpec) -> bytes:
    """Return one reconstructed example as PNG, with values clamped to [0, 1].

    file: path of the case's reconstruction, relative to `run`. number: index of the example in it, from 0. Raises NoImage if the
    example cannot be read or is no image that can be shown, such as a table row.
    """
    pair = _read_alone(run, file, number, data)
    if pair.reconstruction is None:
        raise NoImage(pair.problem or "these data are table rows: their values are listed, and there is no image")
    return pair.reconstruction.png


def encode_pair(run: Path, file: str, data: DataSpec) -> PicturePair:
    """Return original and reconstruction of the pair in `file`, which scoring wrote, relative to `run`.

    Raises NoImage if the file cannot be read or holds a table row.
    """
    pair = _read_pair(run, file, data)
    if pair.original is None or pair.reconstruction is None:
        raise NoImage(pair.problem or "these data are table rows: their values are listed, and there is no image")
    return PicturePair(pair.original.png, pair.reconstruction.png)


def read_rows(run: Path, file: str, whole: WholeReconstruction, data: DataSpec) -> dict[int, ExamplePair]:
    """Return the first reconstructed examples of a case with tabular data, at most `MAX_ROWS`.

    The result is a dict from the index of an example in the reconstruction to its values, without an original. It ends before the
    first example that cannot be read. file: path of the case's reconstruction, relative to `run`. whole: the content of this file
    without its examples.
    """
    pairs = {}
    for number in range(min(whole.answer.examples, MAX_ROWS)):
        try:
            pairs[number] = _read_alone(run, file, number, data)
        except NoImage:
            break
    return pairs


def read_paired_rows(run: Path, scores: Sequence[ShownScore], data: DataSpec) -> dict[int, ExamplePair]:
    """Return true examples of a case with tabular data, each with its reconstruction, from the first `MAX_ROWS` of `scores`.

    The result is a dict from the position of an example in `scores` to the pair. It has no entry for an example without a pair
    file, or whose file cannot be opened. If a file holds no valid table row, only the field `problem` of its pair is set.
    """
    pairs = {}
    for number, score in enumerate(scores[:MAX_ROWS]):
        try:
            if score.pair is not None:
                pairs[number] = _read_pair(run, score.pair, data)
        except NoImage:
            continue
    return pairs


def _read_alone(run: Path, file: str, number: int, data: DataSpec) -> ExamplePair:
    try:
        x = read_example(run, file, number)
    except IndexError as error:
        raise NoImage(str(error)) from None
    except ValueError as error:
        raise NoImage(f"the reconstruction cannot be read: {format_error(error, run)}") from None
    if x.shape != data.shape:
        raise NoImage(
            f"the examples in {file} have shape {x.shape}, but those of the recording have shape {data.shape}; {REPLACE_ADVICE}"
        )
    return show_alone(x, data)


def _read_pair(run: Path, file: str, data: DataSpec) -> ExamplePair:
    """Return the original and the reconstruction in `file`, which scoring wrote, relative to `run`.

    Raises NoImage if the file cannot be opened or, for images, is not a PNG of twice the width and once the height of an example.
    If the rest of the content is damaged, only the field `problem` of the pair is set. The declared size is checked before
    decoding, since a file of a few bytes can declare an image of any size.
    """
    try:
        content = read_bytes(run, file, limit=MAX_BYTES)
        if data.is_image:
            with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
                height, width = data.shape[1:]
                if image.size != (2 * width, height):
                    raise NoImage(
                        f"the picture {file} must be a PNG of {2 * width} by {height} pixels, got {image.width} by "
                        f"{image.height}; {SCORE_ADVICE}"
                    )
        return read_pair(run, file, data.columns)
    except NoImage:
        raise
    except (OSError, ValueError, SyntaxError, TypeError, OverflowError, StructError) as error:
        reason = error.reason if isinstance(error, DamagedFile) else "it is not a valid PNG"
        raise NoImage(f"the picture {file} cannot be read: {reason}; {SCORE_ADVICE}") from None
