"""Split of the data sets in `DATA_FILES` into the parts tuning, validation and report, by a hash of each example.

The part of an example does not depend on the benchmark that draws it or on the file that it comes from:

    tuning      chooses settings, presets, thresholds and calibration curves
    validation  checks a choice before it is reported
    report      gives the numbers of published tables, and chooses no settings

`tuned.json` lists examples that were used to choose a setting. The listed examples count as tuning, whatever their hash.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim import data as datasets
from fedsim.data.base import Examples
from fedsim.recording import DataSpec
from support.contract import Options

Part = Literal["tuning", "validation", "report"]
PARTS: tuple[Part, ...] = get_args(Part)
PARTS_OF_TENTHS: tuple[Part, ...] = ("tuning",) * 4 + ("validation",) * 2 + ("report",) * 4
"""Part of an example, by the hash of its content modulo 10: 40, 20 and 40 % of examples."""
TUNED_FILE = Path(__file__).parents[1] / "tuned.json"
DATA_FILES = {
    "cifar10": "cifar10/train.npz",
    "cifar10_test": "cifar10/test.npz",
    "cifar100": "cifar100/cifar100_4k.npz",
    "lfw": "lfw/lfw32.npz",
    "mnist": "mnist/mnist10k.npz",
    "imagenet": "imagenet128/train.npz",
}
EMBEDDED_PHOTOS: tuple[str, dict[str, Any]] = ("photos", {"size": 32})
EMBEDDED_DATA_SETS: dict[str, tuple[str, dict[str, Any]]] = dict.fromkeys(
    ("photos", "cifar10", "cifar10_test", "cifar100", "lfw", "imagenet"), EMBEDDED_PHOTOS
)
EMBEDDED_DATA_SETS["mnist"] = ("digits", {})
"""Embedded data sets for missing files. They were used to choose settings, so that their rows have the part "embedded"."""


class TunedOn(ValueError):
    """Error for a benchmark that is about to report on examples that were used to choose a setting."""


@dataclass(frozen=True)
class Images:
    """Labelled examples of one data set.

    name: of the data set. x: (N, *shape) in [0, 1]. y: (N,) int64. data: shape, classes and normalisation.
    part: "tuning", "validation" or "report"; "embedded" for examples without such a part, such as data shipped with this project.
    """

    name: str
    x: Tensor
    y: Tensor
    data: DataSpec
    part: str = "embedded"

    def __len__(self) -> int:
        return len(self.x)

    def of_two_classes(self) -> "Images":
        """Return the images with the labels `label % 2`, 0 or 1, for a model of two classes with a single logit."""
        return replace(self, y=self.y % 2, data=replace(self.data, num_classes=2))

    def take_first(self, count: int) -> "Images":
        """Return the first `count` images, or all if there are fewer."""
        return replace(self, x=self.x[:count], y=self.y[:count])

    def split(self, count: int) -> list["Images"]:
        """Return consecutive parts of `count` images each; the last part may be smaller."""
        return [replace(self, x=x, y=y) for x, y in zip(self.x.split(count), self.y.split(count), strict=True)]

    def of(self, rows: Sequence[int]) -> "Images":
        """Return the images with the indices `rows`, in this order."""
        return replace(self, x=self.x[list(rows)], y=self.y[list(rows)])

    def to_bytes(self) -> Tensor:
        """Return the images in 8 bits, (N, *shape) uint8."""
        return (self.x * 255).round().byte()

    def write(self, path: Path) -> None:
        """Write the images into an archive for the data set `npz`; their classes are named by their numbers."""
        names = np.arange(self.data.num_classes).astype(str)
        np.savez(path, images=self.to_bytes().permute(0, 2, 3, 1).numpy(), labels=self.y.numpy(), class_names=names)


def load_images(options: Options, name: str, count: int, *, part: Part = "report", skip: int = 0) -> Images:
    """Return `count` examples of one part of the data set `name`, in the order of their hashes.

    skip: number of examples at the beginning of this order to leave out, such as those of another draw.
    Without a file of this data set (`DATA_FILES`) in the folder --data, the examples are from an embedded data set instead, in a
    fixed random order: the result's part is "embedded", and examples repeat if there are too few. With a file, raises ValueError
    if the part has too few examples.
    """
    path = options.data / DATA_FILES[name] if options.data and name in DATA_FILES else None
    if path is None or not path.exists():
        return _load_embedded(name, count, skip, missing=path)
    loaded = _load(path)
    chosen = draw(loaded.examples.values, count, part=part, skip=skip, source=str(path))
    if part == "report":
        refuse_tuned(hash_example(value) for value in loaded.examples.values[chosen])
    x, y = loaded.examples[chosen]
    return Images(name, x, y, loaded.spec, part)


def count_part(options: Options, name: str, part: Part) -> int:
    """Return the number of different examples in one part of the data set `name`.

    Raises ValueError if there is no file of this data set in the folder --data.
    """
    if options.data is None or not (options.data / DATA_FILES[name]).exists():
        raise ValueError(f"--data must name a folder with {DATA_FILES[name]}, got {options.data}")
    values = _load(options.data / DATA_FILES[name]).examples.values
    return sum(find_part(key) == part for key in {hash_example(value) for value in values})


def draw(values: NDArray[Any], count: int, *, part: Part, skip: int = 0, source: str = "the data set") -> NDArray[np.int64]:
    """Return the indices (count,) of examples of a part, in the order of their hashes.

    values: examples (N, ...), as stored. Of examples with the same content, only one is used. skip: number of examples at the
    beginning of this order to leave out. source: name of the data set in error messages.
    Raises ValueError if the part has fewer than skip + count examples, or is unknown.
    """
    if part not in PARTS:
        raise ValueError(f"unknown part {part!r} of a data set; use one of {', '.join(PARTS)}")
    by_hash = {hash_example(value): i for i, value in enumerate(values)}
    own = [by_hash[key] for key in sorted(by_hash) if find_part(key) == part]
    if len(own) < skip + count:
        raise ValueError(f"the {part} part of {source} has {len(own)} examples, and {skip + count} were asked for")
    return np.array(own[skip : skip + count], dtype=np.int64)


def hash_example(value: NDArray[Any]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of an example's shape and bytes."""
    content = np.ascontiguousarray(value)
    return hashlib.sha256(str(content.shape).encode() + content.tobytes()).hexdigest()[:16]


def find_part(key: str) -> Part:
    """Return the part of the example with the hash `key`, hexadecimal digits.

    It is "tuning" if `tuned.json` lists the hash, otherwise the entry of `PARTS_OF_TENTHS` with the index hash modulo 10.
    """
    return "tuning" if key in _read_tuned() else PARTS_OF_TENTHS[int(key, 16) % 10]


def refuse_tuned(keys: Iterable[str]) -> None:
    """Raise TunedOn if `tuned.json` lists one of the hashes `keys`, so that its example was used to choose a setting."""
    for key in keys:
        if key in _read_tuned():
            raise TunedOn(f"example {key} was used to choose {_read_tuned()[key]!r} (tuned.json); report on other examples")


def record_tuned(purpose: str, keys: Iterable[str], path: Path = TUNED_FILE) -> None:
    """Add the hashes `keys` of examples to `tuned.json`. purpose: the setting that these examples were used to choose."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known[purpose] = sorted({*known.get(purpose, []), *keys})
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    _read_tuned.cache_clear()


@cache
def _read_tuned() -> dict[str, str]:
    """Return a dict from the hash of each example listed in `tuned.json` to a setting that it was used to choose."""
    known = json.loads(TUNED_FILE.read_text()) if TUNED_FILE.exists() else {}
    return {key: purpose for purpose, keys in known.items() for key in keys}


@dataclass(frozen=True)
class _Loaded:
    examples: Examples
    spec: DataSpec


@cache
def _load(path: Path) -> _Loaded:
    """Load all examples of an archive, both its training and its held-out ones, and their specification."""
    loaded = datasets.load(f"npz:{path}")
    values, labels = (
        np.concatenate([getattr(part, name) for part in (loaded.train, loaded.test)]) for name in ("values", "labels")
    )
    return _Loaded(Examples(values=values, labels=labels), loaded.spec)


def _load_embedded(name: str, count: int, skip: int, *, missing: Path | None) -> Images:
    if missing is not None:
        print(f"{missing} does not exist: {EMBEDDED_DATA_SETS[name][0]} instead, which has helped to choose settings")
    kind, arguments = EMBEDDED_DATA_SETS[name]
    loaded = datasets.load(kind, **arguments)
    order = np.random.default_rng(0).permutation(len(loaded.train))
    chosen = np.resize(order, skip + count)[skip:]  # examples repeat if the embedded data set is too small
    x, y = loaded.train[chosen]
    return Images(kind, x, torch.as_tensor(y), loaded.spec)
