"""Data sets by name: examples with values in [0, 1], labels, and a public specification."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from defenses.registry import Registry, bind
from fedsim.wire.observation import Column, DataSpec

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """Examples in order: `values` as stored (uint8 pixels or float32 in [0, 1]), shape (N, *shape), and labels (N,)."""

    values: Array
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Any) -> tuple[Tensor, Tensor]:
        """(x, y): float32 in [0, 1], and int64."""
        values = self.values[indices]
        scale = 255 if values.dtype == np.uint8 else 1
        return torch.from_numpy(values.astype(np.float32) / scale), torch.from_numpy(self.labels[indices].astype(np.int64))


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Training and held-out examples, which share none."""

    name: str
    spec: DataSpec
    class_names: tuple[str, ...]
    train: Examples
    test: Examples

    def content_hash(self) -> str:
        """Names the training examples and their order, so that truth is never joined with other data."""
        digest = hashlib.sha256(str(self.train.values.shape).encode())
        digest.update(np.ascontiguousarray(self.train.values).tobytes())
        digest.update(self.train.labels.astype(np.int64).tobytes())
        return digest.hexdigest()


# --- photographs that scikit-image and scikit-learn ship ---

PHOTOGRAPHS = {
    "astronaut": ("skimage.data", "astronaut.png"),
    "cat": ("skimage.data", "chelsea.png"),
    "coffee": ("skimage.data", "coffee.png"),
    "motorcycle": ("skimage.data", "motorcycle_left.png"),
    "rocket": ("skimage.data", "rocket.jpg"),
    "tissue": ("skimage.data", "ihc.png"),
    "palace": ("sklearn.datasets.images", "china.jpg"),
    "flower": ("sklearn.datasets.images", "flower.jpg"),
}
MIN_CONTRAST = 0.04
"""Smallest standard deviation of a crop that is used: of plain sky any guess is right, which would flatter an attack."""


def photos(size: int = 32, scale: int | None = None) -> Dataset:
    """Crops of colour photographs; the label is the photograph.

    size:  height and width of an example: 32, 64 or 128 pixels.
    scale: the window in the photograph is `scale` times as large and averaged down; 2 for 32 pixels, else 1.

    Windows do not overlap. Those in the left three quarters of a photograph are for training, the others held out.
    """
    if size not in (32, 64, 128):
        raise ValueError(f"photos: size must be 32, 64 or 128, got {size}")
    scale = (2 if size == 32 else 1) if scale is None else scale
    if not 0 < size * scale <= 128:
        raise ValueError(f"photos: a window is size x scale pixels wide, from 1 to 128, got {size} x {scale}")
    train: list[tuple[Array, int]] = []
    test: list[tuple[Array, int]] = []
    for label, photograph in enumerate(PHOTOGRAPHS):
        windows = _windows(_read_photograph(photograph), size * scale)
        border = max(column for column, _ in windows) * 3 // 4
        for column, window in windows:
            crop = window.reshape(size, scale, size, scale, 3).mean(axis=(1, 3)).round().astype(np.uint8)
            if crop.std() >= MIN_CONTRAST * 255:
                (train if column <= border else test).append((crop.transpose(2, 0, 1), label))
    spec = DataSpec(shape=(3, size, size), num_classes=len(PHOTOGRAPHS))
    return Dataset(name="photos", spec=spec, class_names=tuple(PHOTOGRAPHS), train=_stack(train), test=_stack(test))


def _windows(image: Array, size: int) -> list[tuple[int, Array]]:
    rows, columns = image.shape[0] // size, image.shape[1] // size
    return [
        (column, image[row * size : (row + 1) * size, column * size : (column + 1) * size])
        for row in range(rows)
        for column in range(columns)
    ]


def _read_photograph(name: str) -> Array:
    from skimage.io import imread

    package, file = PHOTOGRAPHS[name]
    path = Path(str(files(package))) / file
    if not path.exists():
        raise FileNotFoundError(f"photos: {path} is missing; reinstall {package.split('.')[0]}, which ships it")
    image: Array = imread(path)[..., :3]
    return image


def _stack(pairs: list[tuple[Array, int]]) -> Examples:
    return Examples(values=np.stack([crop for crop, _ in pairs]), labels=np.array([label for _, label in pairs]))


# --- scikit-learn's own ---


def digits() -> Dataset:
    """Handwritten digits, 8x8 grey (UCI, through scikit-learn); every fifth example is held out."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = (loaded.images / 16).astype(np.float32)[:, None]
    spec = DataSpec(shape=(1, 8, 8), num_classes=10)
    return _every_fifth_held_out("digits", spec, tuple("0123456789"), images, loaded.target)


def breast_cancer() -> Dataset:
    """Wisconsin breast cancer table: 30 measurements, benign or malignant (UCI, through scikit-learn).

    Each column is scaled to [0, 1] by its range, which the specification carries; every fifth example is held out.
    """
    from sklearn.datasets import load_breast_cancer

    loaded = load_breast_cancer()
    low, high = loaded.data.min(axis=0), loaded.data.max(axis=0)
    rows = ((loaded.data - low) / (high - low)).astype(np.float32)
    columns = tuple(
        Column(name=str(name), low=float(a), high=float(b)) for name, a, b in zip(loaded.feature_names, low, high, strict=True)
    )
    spec = DataSpec(shape=(30,), num_classes=2, columns=columns)
    return _every_fifth_held_out("breast_cancer", spec, tuple(map(str, loaded.target_names)), rows, loaded.target)


def _every_fifth_held_out(name: str, spec: DataSpec, classes: tuple[str, ...], values: Array, labels: Array) -> Dataset:
    held_out = np.arange(len(labels)) % 5 == 4
    train = Examples(values=values[~held_out], labels=labels[~held_out])
    test = Examples(values=values[held_out], labels=labels[held_out])
    return Dataset(name=name, spec=spec, class_names=classes, train=train, test=test)


# --- files ---


def npz(train: str, test: str | None = None, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> Dataset:
    """Images from NumPy archives with `images` (N, H, W[, C]), uint8 or in [0, 1], and `labels` (N,).

    train, test: paths; without the second, every fifth example of the first is held out.
    mean, std:   the normalisation of the model's input, one value for all channels or one for each.
    """
    values, labels, names = _read_npz(Path(train))
    classes = names or tuple(map(str, range(int(labels.max()) + 1)))
    spec = DataSpec(shape=values.shape[1:], num_classes=max(len(classes), 2), mean=tuple(mean), std=tuple(std))
    name = f"npz:{train}"
    if test is None:
        return _every_fifth_held_out(name, spec, classes, values, labels)
    held_values, held_labels, _ = _read_npz(Path(test))
    if held_values.shape[1:] != values.shape[1:]:
        raise ValueError(f"{test}: examples of shape {held_values.shape[1:]} do not go with those of {train}, {values.shape[1:]}")
    if held_labels.max() >= len(classes):
        raise ValueError(f"{test}: label {held_labels.max()} is none of the {len(classes)} classes of {train}")
    held_out = Examples(values=held_values, labels=held_labels)
    return Dataset(name=name, spec=spec, class_names=classes, train=Examples(values=values, labels=labels), test=held_out)


def _read_npz(path: Path) -> tuple[Array, Array, tuple[str, ...]]:
    if not path.exists():
        raise FileNotFoundError(f"data set file {path} does not exist")
    if not is_zipfile(path):
        raise ValueError(f"{path}: not a NumPy archive (.npz)")
    with np.load(path, allow_pickle=False) as archive:
        if missing := {"images", "labels"} - set(archive.files):
            raise ValueError(f"{path}: no array {sorted(missing)[0]!r}; it holds {', '.join(archive.files)}")
        try:
            images, labels = archive["images"], archive["labels"]
            names = tuple(map(str, archive["class_names"])) if "class_names" in archive.files else ()
        except (ValueError, BadZipFile) as error:
            raise ValueError(f"{path}: {error}") from None
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer) or not len(labels):
        raise ValueError(f"{path}: expected images (N, H, W[, C]) and integer labels (N,), got {images.shape} and {labels.shape}")
    if images.shape[3] not in (1, 3):
        raise ValueError(f"{path}: images must have 1 or 3 channels, got {images.shape[3]}")
    if labels.min() < 0:
        raise ValueError(f"{path}: labels must not be negative, got {labels.min()}")
    if names and labels.max() >= len(names):
        raise ValueError(f"{path}: label {labels.max()} is none of the {len(names)} class_names")
    if images.dtype != np.uint8:
        images = images.astype(np.float32)
        if not (images.min() >= 0 and images.max() <= 1):
            raise ValueError(f"{path}: float images must lie in [0, 1], got [{images.min()}, {images.max()}]")
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels, names


DATASETS: Registry[Callable[..., Dataset]] = Registry(
    "fedsim.datasets",
    {
        "photos": photos,
        "digits": digits,
        "breast_cancer": breast_cancer,
        "npz": npz,
    },
)


def load(name: str, **arguments: Any) -> Dataset:
    """A data set by name, with its arguments; loaded once a process.

    `npz:TRAIN[,TEST]` is short for name `npz` with those two paths.
    """
    return _load(name, json.dumps(arguments, sort_keys=True))


@lru_cache(maxsize=4)
def _load(name: str, arguments: str) -> Dataset:
    name, _, positional = name.partition(":")
    factory = DATASETS[name]
    return factory(**bind(name, factory, *filter(None, positional.split(",")), given=json.loads(arguments)))


def described(dataset: Dataset, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What truth says of the data set that its indices refer to."""
    return {
        "name": dataset.name,
        "arguments": dict(arguments),
        "content_hash": dataset.content_hash(),
        "size": len(dataset.train),
    }
