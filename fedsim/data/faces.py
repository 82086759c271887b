"""Loader of the data set Labeled Faces in the Wild (LFW), which scikit-learn downloads into a cache."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from fedsim.data.base import Array, Dataset, Examples
from fedsim.data.cache import fetch_once
from fedsim.recording.observation import DataSpec

FACE_CROP = (61, 61, 189, 189)
"""Left, upper, right and lower edge in pixels of the part of a photograph (250x250) that is used, as in CPL."""


def lfw(
    size: int = 32, min_faces: int = 14, root: str | None = None, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)
) -> Dataset:
    """Load LFW: colour photographs of 106 people by default, 2,801 for training, 934 held out; downloaded once.

    The label is the person.

    size:      height and width of an example: 32, 64 or 128 pixels; the middle 128x128 pixels of the photograph, scaled down to
               this size, as in CPL (Wei et al. 2020).
    min_faces: people with fewer photographs are omitted.
    root:      folder to which the data are downloaded; by default the environment variable FEDLEAK_CACHE, or
               ~/.cache/fedleak/datasets.
    mean, std: the model's input is (value - mean) / std; one number for all channels or one per channel.

    The photographs are in scikit-learn's fixed shuffled order, and the last quarter is held out. The partition `by_group` can use
    the column `person`.
    """
    if size not in (32, 64, 128):
        raise ValueError(f"lfw: size must be 32, 64 or 128, got {size}")
    home = fetch_once("lfw", root, "lfw_home", _download) / "lfw_home"
    paths, labels, people = _find_faces(home / "lfw_funneled", min_faces)
    values = np.empty((len(paths), 3, size, size), dtype=np.uint8)
    for i, path in enumerate(paths):
        values[i] = _read_face(path, size)
    examples = Examples(values=values, labels=labels, groups={"person": np.array(people, dtype=object)[labels]})
    border = len(paths) * 3 // 4
    spec = DataSpec(shape=(3, size, size), num_classes=len(people), mean=tuple(mean), std=tuple(std))
    train, test = examples.select(np.arange(border)), examples.select(np.arange(border, len(paths)))
    return Dataset(name="lfw", spec=spec, class_names=people, train=train, test=test)


def _download(folder: str) -> None:
    """Download LFW by scikit-learn. No person has enough photographs, so that it raises ValueError before it loads images."""
    from sklearn.datasets import fetch_lfw_people

    with suppress(ValueError):
        fetch_lfw_people(data_home=folder, min_faces_per_person=10**6, n_retries=1, delay=0.1)
    shutil.rmtree(Path(folder) / "lfw_home" / "joblib", ignore_errors=True)


def _find_faces(folder: Path, min_faces: int) -> tuple[list[Path], Array, tuple[str, ...]]:
    """Return the paths of N photographs, their labels (N,), and the name of the person of each label.

    People with fewer than `min_faces` photographs are omitted. The order of the photographs is that of scikit-learn's
    `fetch_lfw_people`.
    Raises ValueError if `folder` is missing, or if fewer than two people are left.
    """
    if not folder.is_dir():
        raise ValueError(f"lfw: {folder} is missing; delete {folder.parent} to download it again")
    photographs = {person.name: sorted(person.iterdir()) for person in sorted(folder.iterdir()) if person.is_dir()}
    chosen = {name.replace("_", " "): paths for name, paths in photographs.items() if len(paths) >= min_faces}
    if len(chosen) < 2:
        raise ValueError(
            f"lfw: {len(chosen)} of {len(photographs)} people have at least {min_faces} photographs, but 2 people are needed; "
            "lower min_faces"
        )
    people = tuple(sorted(chosen))
    number = {name: label for label, name in enumerate(people)}
    pairs = [(path, number[name]) for name, paths in chosen.items() for path in paths]
    order = np.arange(len(pairs))
    np.random.RandomState(42).shuffle(order)
    return [pairs[i][0] for i in order], np.array([pairs[i][1] for i in order]), people


def _read_face(path: Path, size: int) -> Array:
    """Return the middle 128x128 pixels of a photograph, scaled to (3, size, size) uint8. Raises ValueError for a damaged file."""
    from PIL import Image

    try:
        with Image.open(path, formats=("JPEG",)) as photograph:
            face = photograph.convert("RGB").crop(FACE_CROP).resize((size, size))
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"lfw: {path} cannot be read ({error}); delete the folder {path.parents[2]} to download the data set again"
        ) from None
    return np.asarray(face).transpose(2, 0, 1)
