"""Registry of data sets: examples with values in [0, 1], labels, and a public specification."""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from defenses.registry import Registry, bind_arguments, calls, references
from fedsim.data.archives import npz
from fedsim.data.base import Dataset, Examples
from fedsim.data.client_parts import part, public
from fedsim.data.faces import lfw
from fedsim.data.image_folder import imagefolder
from fedsim.data.shipped import breast_cancer, digits, lfw_patches, photos
from fedsim.data.table import csv
from fedsim.data.torchvision_sets import cifar10, cifar100, fashion_mnist, mnist

__all__ = [
    "DATASETS",
    "Dataset",
    "Examples",
    "breast_cancer",
    "cifar10",
    "cifar100",
    "csv",
    "describe",
    "digits",
    "fashion_mnist",
    "imagefolder",
    "is_code",
    "lfw",
    "lfw_patches",
    "load",
    "load_text",
    "mnist",
    "npz",
    "parse_text",
    "part",
    "photos",
    "public",
    "split_name",
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
    """Load a data set by name, with its arguments. The four data sets used last are kept in memory and not loaded again.

    name: a key of `DATASETS`, or your own code as `module:function`. `npz:TRAIN[,TEST]` is short for the name `npz` with these
    two paths as arguments; likewise `imagefolder:PATH`, `csv:PATH[,LABEL]`, `part:PATH` and `public:PATH`.
    Raises ValueError for an unknown name, wrong arguments and invalid data, and FileNotFoundError for a missing file.
    """
    return _load(name, json.dumps(arguments, sort_keys=True))


def load_text(text: str) -> Dataset:
    """Load a data set given as a text with arguments, such as "photos", "photos(size=64)" or "npz:TRAIN"."""
    name, arguments = parse_text(text)
    return load(name, **arguments)


def parse_text(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a text such as "photos(size=64)" into name and arguments for `load`. Raises ValueError if it is not one data set."""
    if ":" in text and "(" not in text and not is_code(text):
        return text, {}
    steps = calls.parse(text, lambda name: DATASETS[name], "data set")
    if len(steps) != 1:
        raise ValueError(f"{text!r} does not name one data set; write it as 'photos' or 'photos(size=64)'")
    return steps[0].name, dict(steps[0].arguments)


def split_name(name: str) -> tuple[str, str]:
    """Split "npz:TRAIN,TEST" into "npz" and the text of the positional arguments, "TRAIN,TEST".

    This text is empty if there are no such arguments. A `module:function` is not split.
    """
    if is_code(name):
        return name, ""
    kind, _, positional = name.partition(":")
    return kind, positional


def is_code(name: str) -> bool:
    """Return whether `name` is a `module:function`, as opposed to a data set with a path, such as "npz:train"."""
    return references.is_reference(name) and name.partition(":")[0] not in DATASETS


@lru_cache(maxsize=4)
def _load(name: str, arguments: str) -> Dataset:
    name, positional = split_name(name)
    factory = DATASETS[name]
    found: object = factory(**bind_arguments(name, factory, *filter(None, positional.split(",")), given=json.loads(arguments)))
    if not isinstance(found, Dataset):
        raise ValueError(f"the data set {name} must return a fedsim.data.Dataset, got {type(found).__name__}")
    return found


def describe(dataset: Dataset, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict that identifies a data set: name, arguments, content_hash and size (the number of training examples).

    name, arguments: as they were passed to `load`.

    Clients store the dict with the indices of the examples that they used, so that scoring finds the same examples.
    """
    return {"name": name, "arguments": dict(arguments), "content_hash": dataset.compute_hash(), "size": len(dataset.train)}
