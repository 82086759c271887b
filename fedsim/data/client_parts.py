"""Data of one party of a deployment: a client's own part, or the server's public description of all clients' data."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from fedsim.data.base import Array, Dataset, Examples
from fedsim.recording.array_archives import read_arrays, read_text
from fedsim.recording.files import make_private, open_replacement, write_json
from fedsim.recording.observation import DataSpec
from fedsim.recording.safe_files import parse_json

FACTS_FILE, EXAMPLES_FILE = "data.json", "examples.npz"


def part(path: str) -> Dataset:
    """Load one client's own examples, all for training, from a folder that `fedsim split` or `fedsim part` wrote.

    path: folder with `data.json`, the specification, and `examples.npz` with `values` (N, *shape), uint8 or float32 in [0, 1],
          and `labels` (N,).
    """
    facts, examples = _read(Path(path))
    return Dataset(
        name=f"part:{path}", spec=facts.spec, class_names=facts.class_names, train=examples, test=_make_empty(facts.spec)
    )


def public(path: str) -> Dataset:
    """Load what the server knows about the clients' data: the specification, and held-out examples, if any.

    path: folder `public` that `fedsim split` wrote. Its examples are held out; there are none for training.
    """
    facts, examples = _read(Path(path))
    return Dataset(
        name=f"public:{path}", spec=facts.spec, class_names=facts.class_names, train=_make_empty(facts.spec), test=examples
    )


def read_sizes(path: Path) -> list[int]:
    """Return the clients' numbers of examples from the public description in the folder `path`: ascending, without names."""
    return list(_read_facts(path).sizes)


def write_part(folder: Path, data: Dataset, examples: Examples) -> None:
    """Write `examples` of `data` to `folder` as the part of one client. Raises ValueError if there are no examples."""
    if not len(examples):
        raise ValueError(f"{folder}: this client gets no examples; use data with at least one for each client, or fewer clients")
    _write(folder, {"spec": asdict(data.spec), "class_names": data.class_names}, examples)


def write_public(folder: Path, data: Dataset, sizes: Sequence[int]) -> None:
    """Write what the server knows about `data` to `folder`: specification, held-out examples, and sizes of the clients' parts.

    sizes: number of examples of each client; these numbers are written in ascending order.
    """
    _write(folder, {"spec": asdict(data.spec), "class_names": data.class_names, "sizes": sorted(map(int, sizes))}, data.test)


def fit_to(data: Dataset, like: Dataset) -> Dataset:
    """Return `data` with the specification and the class names of `like`, the server's public description.

    Labels stay as they are; `renumber_classes` changes them.
    Raises ValueError if shapes or columns differ, if a label is not among the classes of `like`, or if a class has another name
    than the class of the same number in `like` and both data sets have names other than numbers.
    """
    if data.spec.shape == like.spec.shape and data.spec.columns != like.spec.columns:
        raise ValueError(
            f"{data.name}: columns, ranges or categories differ from those of {like.name}, the server's description of the "
            "data; load the same columns, and give the data set the same arguments ranges and categories at all parties"
        )
    if data.spec.shape != like.spec.shape:
        channels, side = like.spec.shape[0], like.spec.shape[-1]
        scaled = f", such as \"imagefolder(path='FOLDER', size={side}, channels={channels})\"" if like.spec.is_image else ""
        raise ValueError(
            f"{data.name}: examples have shape {data.spec.shape}, but those of {like.name}, the server's description of the "
            f"data, have {like.spec.shape}; load your data in that shape{scaled}"
        )
    for examples in (data.train, data.test):
        if len(examples) and examples.labels.max() >= like.spec.num_classes:
            raise ValueError(
                f"{data.name}: label {examples.labels.max()} is not one of the {like.spec.num_classes} classes of {like.name}, "
                f"0 to {like.spec.num_classes - 1}; correct or remove these examples"
            )
    if (
        _has_names(data)
        and _has_names(like)
        and (renamed := [a for a, b in zip(data.class_names, like.class_names, strict=False) if a != b])
    ):
        raise ValueError(
            f"{data.name}: class {renamed[0]!r} has another index than in {like.name}, or is not among its classes; write your "
            f"data with `fedsim part`, which accepts only these classes, in this order: {', '.join(like.class_names)}"
        )
    return replace(data, spec=like.spec, class_names=like.class_names)


def renumber_classes(data: Dataset, like: Dataset) -> Dataset:
    """Return `data` with its classes renumbered as in `like`, matched by name.

    A party that holds only some of the classes numbers them differently. If the classes of either data set are named by their
    numbers, `data` is returned unchanged. Raises ValueError for a class that `like` does not have.
    """
    if not (_has_names(data) and _has_names(like)):
        return data
    if unknown := [name for name in data.class_names if name not in like.class_names]:
        raise ValueError(
            f"{data.name}: class {unknown[0]!r} is not one of {like.name}'s classes, which are {', '.join(like.class_names)}; "
            "rename it, or remove its examples"
        )
    numbers = np.array([like.class_names.index(name) for name in data.class_names])
    train, test = (replace(examples, labels=numbers[examples.labels]) for examples in (data.train, data.test))
    spec = replace(data.spec, num_classes=like.spec.num_classes)
    return replace(data, spec=spec, train=train, test=test, class_names=like.class_names)


def _has_names(data: Dataset) -> bool:
    """Return whether the classes have names other than their numbers."""
    return data.class_names != tuple(map(str, range(len(data.class_names))))


def concatenate(*parts: Examples) -> Examples:
    """Concatenate examples, without their groups. If some have uint8 values and others float32, all become float32."""
    values = [part.values for part in parts]
    if len({array.dtype for array in values}) > 1:
        values = [array.astype(np.float32) / 255 if array.dtype == np.uint8 else array for array in values]
    return Examples(values=np.concatenate(values), labels=np.concatenate([part.labels.astype(np.int64) for part in parts]))


class _PartMetadata:
    """The content of `data.json`: specification and class names. In the folder `public`, also the sizes of the clients' parts."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.spec: DataSpec = TypeAdapter(DataSpec).validate_python(raw["spec"])
        self.class_names = tuple(map(str, raw["class_names"]))
        self.sizes: tuple[int, ...] = tuple(raw.get("sizes", ()))


def _read_facts(folder: Path) -> _PartMetadata:
    path = folder / FACTS_FILE
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no data: it has no {FACTS_FILE}; create it with fedsim split or fedsim part")
    try:
        return _PartMetadata(parse_json(read_text(path)))
    except (ValidationError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from None


def _read(folder: Path) -> tuple[_PartMetadata, Examples]:
    facts, path = _read_facts(folder), folder / EXAMPLES_FILE
    arrays = read_arrays(path, ("values", "labels"))
    if arrays["labels"].dtype.kind not in "iu" or arrays["labels"].ndim != 1:
        found = arrays["labels"]
        raise ValueError(f"{path}: labels must be integers of shape (N,), got {found.dtype} of shape {found.shape}")
    try:
        examples = Examples(values=arrays["values"], labels=arrays["labels"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    _check(path, facts.spec, examples)
    return facts, examples


def _check(path: Path, spec: DataSpec, examples: Examples) -> None:
    """Raise ValueError, naming `path`, if the examples' shape, type, values or labels do not fit the specification."""
    values: Array = examples.values
    if values.shape[1:] != spec.shape or values.dtype not in (np.uint8, np.float32):
        shape = ", ".join(map(str, spec.shape))
        raise ValueError(
            f"{path}: values must be uint8 or float32 of shape (N, {shape}), got {values.dtype} of shape {values.shape}"
        )
    if len(values) and values.dtype != np.uint8 and not (values.min() >= 0 and values.max() <= 1):
        raise ValueError(f"{path}: values must lie in [0, 1], got [{values.min()}, {values.max()}]")
    if len(values) and not 0 <= examples.labels.min() <= examples.labels.max() < spec.num_classes:
        minimum, maximum = examples.labels.min(), examples.labels.max()
        raise ValueError(f"{path}: labels must be from 0 to {spec.num_classes - 1}, got labels from {minimum} to {maximum}")


def _make_empty(spec: DataSpec) -> Examples:
    """Return an empty set of examples of this specification."""
    return Examples(values=np.zeros((0, *spec.shape), np.float32), labels=np.zeros(0, np.int64))


def _write(folder: Path, facts: dict[str, Any], examples: Examples) -> None:
    make_private(folder)
    with open_replacement(folder / EXAMPLES_FILE) as file:
        np.savez(file, values=examples.values, labels=examples.labels.astype(np.int64))
    write_json(folder / FACTS_FILE, facts)
