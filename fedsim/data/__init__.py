"""Data sets by name: examples with values in [0, 1], labels, and a public specification."""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from defenses._registry import Registry, bind, calls, references
from fedsim.data.archives import npz
from fedsim.data.base import Array, Dataset, Examples
from fedsim.data.client_parts import part, public
from fedsim.data.faces import lfw
from fedsim.data.image_folder import imagefolder
from fedsim.data.shipped import MIN_CONTRAST, PHOTOGRAPHS, breast_cancer, digits, lfw_patches, photos
from fedsim.data.table import csv
from fedsim.data.torchvision_sets import cifar10, cifar100, fashion_mnist, mnist

__all__ = [
    "DATASETS",
    "MIN_CONTRAST",
    "PHOTOGRAPHS",
    "Array",
    "Dataset",
    "Examples",
    "breast_cancer",
    "cifar10",
    "cifar100",
    "csv",
    "described",
    "digits",
    "fashion_mnist",
    "imagefolder",
    "is_code",
    "lfw",
    "lfw_patches",
    "load",
    "mnist",
    "named",
    "named_parts",
    "npz",
    "parsed",
    "part",
    "photos",
    "public",
]

DATASETS: Registry[Callable[..., Dataset]] = Registry(
    "fedsim.data",
    {
        "photos": photos,
        "digits": digits,
        "lfw_patches": lfw_patches,
        "breast_cancer": breast_cancer,
        "npz": npz,
        "imagefolder": imagefolder,
        "csv": csv,
        "part": part,
        "public": public,
        "mnist": mnist,
        "fashion_mnist": fashion_mnist,
        "cifar10": cifar10,
        "cifar100": cifar100,
        "lfw": lfw,
    },
)


def load(name: str, **arguments: Any) -> Dataset:
    """Load a data set by name; repeated calls with the same arguments return the same object.

    `npz:TRAIN[,TEST]` is short for name `npz` with those two paths; `imagefolder:PATH`, `csv:PATH[,LABEL]` and `part:PATH`
    likewise.
    """
    return _load(name, json.dumps(arguments, sort_keys=True))


def named(text: str) -> Dataset:
    """Load a data set from a text with its arguments: "photos", "photos(size=64)", or "npz:TRAIN"."""
    name, arguments = parsed(text)
    return load(name, **arguments)


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments for `load`, from a text as `named` reads it. Raises ValueError if it names no data set."""
    if ":" in text and "(" not in text and not is_code(text):
        return text, {}
    steps = calls.parse(text, lambda name: DATASETS[name], "data set")
    if len(steps) != 1:
        raise ValueError(f"{text!r} does not name one data set; write it as 'photos' or 'photos(size=64)'")
    return steps[0].name, dict(steps[0].arguments)


def named_parts(name: str) -> tuple[str, str]:
    """Split "npz:TRAIN" into the name of a data set and its first arguments; `module:function` is a name as it is."""
    if is_code(name):
        return name, ""
    kind, _, positional = name.partition(":")
    return kind, positional


def is_code(name: str) -> bool:
    """Return whether `name` is `module:function`, and not the name of a data set with a path, such as "npz:train"."""
    return references.is_reference(name) and name.partition(":")[0] not in DATASETS


@lru_cache(maxsize=4)
def _load(name: str, arguments: str) -> Dataset:
    name, positional = named_parts(name)
    factory = DATASETS[name]
    return factory(**bind(name, factory, *filter(None, positional.split(",")), given=json.loads(arguments)))


def described(dataset: Dataset, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a data set that is saved with the truth; `load(name, **arguments)` loads the data set again."""
    return {
        "name": name,
        "arguments": dict(arguments),
        "content_hash": dataset.content_hash(),
        "size": len(dataset.train),
    }
