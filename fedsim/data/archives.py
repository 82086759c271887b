"""Data sets of images in NumPy archives (.npz)."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsim.data.base import MAX_CLASSES, Array, Dataset, Examples, hold_out_every_fifth
from fedsim.recording.array_archives import read_arrays, read_names
from fedsim.recording.observation import DataSpec

ARRAY_NAMES = {
    ("images", "labels"): None,
    ("train_images", "train_labels"): ("test_images", "test_labels"),
    ("x_train", "y_train"): ("x_test", "y_test"),
}
"""Names of the arrays of images and labels in archives, and of the arrays of held-out examples, if any."""


def npz(train: str, test: str | None = None, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> Dataset:
    """Load images from NumPy archives with `images` (N, H, W[, C]), uint8 or numbers in [0, 1], and integer `labels` (N,).

    train:     path of the archive with the training examples, images of C = 1 or 3 channels.
    test:      path of an archive with the held-out examples: its arrays for testing or, if it has none, all its examples. Without
               `test`, the arrays for testing in `train` are held out or, if `train` has none, every fifth example.
    mean, std: normalisation of the model's input, one value for all channels or one per channel.

    The arrays may also be named `train_images` and `train_labels`, and for testing `test_images` and `test_labels`; or `x_train`
    and `y_train`, and for testing `x_test` and `y_test`. An array `class_names` (K,) is optional.
    """
    own, held_out, names = _read(Path(train))
    if test is not None:
        other = _read(Path(test))
        held_out = other.held_out or other.examples
    classes = names or tuple(map(str, range(int(own.labels.max()) + 1)))
    spec = DataSpec(shape=own.values.shape[1:], num_classes=max(len(classes), 2), mean=tuple(mean), std=tuple(std))
    name = f"npz:{train}"
    if held_out is None:
        return hold_out_every_fifth(name, spec, classes, own)
    path, shape = test or train, held_out.values.shape[1:]
    if shape != spec.shape:
        raise ValueError(f"{path}: held-out examples have shape {shape}, but the training examples of {train} have {spec.shape}")
    if held_out.labels.max() >= len(classes):
        raise ValueError(
            f"{path}: label {held_out.labels.max()} of a held-out example is not one of the {len(classes)} classes of the "
            f"training examples of {train}"
        )
    return Dataset(name=name, spec=spec, class_names=classes, train=own, test=held_out)


class _Archive(NamedTuple):
    examples: Examples
    held_out: Examples | None
    class_names: tuple[str, ...]


def _read(path: Path) -> _Archive:
    if not path.exists():
        raise FileNotFoundError(f"data set file {path} does not exist")
    present = read_names(path)
    keys = _find_arrays(path, present)
    optional = ("class_names",) if "class_names" in present else ()
    arrays = read_arrays(path, [*(name for pair in keys for name in pair), *optional])
    found = [_to_examples(path, arrays[images], arrays[labels]) for images, labels in keys]
    names = tuple(map(str, arrays["class_names"].ravel())) if optional else ()
    if names and found[0].labels.max() >= len(names):
        raise ValueError(f"{path}: label {found[0].labels.max()} is not one of the {len(names)} class_names")
    return _Archive(found[0], found[1] if len(found) > 1 else None, names)


def _find_arrays(path: Path, present: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of names (images, labels): of the training arrays, then of the held-out arrays if there are any.

    Raises ValueError, naming the first array that is missing.
    """
    begun = [keys for keys in ARRAY_NAMES if set(keys) & set(present)] or [next(iter(ARRAY_NAMES))]
    own = next((keys for keys in begun if set(keys) <= set(present)), begun[0])
    held_out = ARRAY_NAMES[own]
    pairs = [own, held_out] if held_out and set(held_out) & set(present) else [own]
    for key in (key for pair in pairs for key in pair if key not in present):
        raise ValueError(f"{path}: no array {key!r}; it holds {', '.join(present)}")
    return pairs


def _to_examples(path: Path, images: Array, labels: Array) -> Examples:
    """Convert arrays to examples, channels first, uint8 or float32. Raises ValueError if images or labels are invalid."""
    if images.ndim == 3:
        images = images[..., None]
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if images.ndim != 4 or labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer) or not len(labels):
        raise ValueError(
            f"{path}: expected images (N, H, W[, C]) and integer labels (N,) with N > 0, got images {images.shape} and "
            f"{labels.dtype} labels {labels.shape}"
        )
    if images.shape[3] not in (1, 3):
        raise ValueError(f"{path}: images must have 1 or 3 channels, got {images.shape[3]}")
    if labels.min() < 0:
        raise ValueError(f"{path}: labels must not be negative, got {labels.min()}")
    if labels.max() >= MAX_CLASSES:
        raise ValueError(f"{path}: label {labels.max()} exceeds the limit of {MAX_CLASSES} classes; number the classes from 0")
    if images.dtype.kind not in "uifb":
        raise ValueError(f"{path}: images must be numbers, got {images.dtype}")
    if images.dtype != np.uint8:
        images = images.astype(np.float32)
        if not (images.min() >= 0 and images.max() <= 1):
            raise ValueError(f"{path}: float images must lie in [0, 1], got [{images.min()}, {images.max()}]")
    return Examples(values=np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels=labels)
