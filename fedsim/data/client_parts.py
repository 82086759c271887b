"""Data of a federation on several machines: the examples of one client, and the public facts that the server has."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from fedsim.data.base import Array, Dataset, Examples
from fedsim.recording.array_archives import read_arrays, read_text
from fedsim.recording.files import make_private, replacing, write_json
from fedsim.recording.observation import DataSpec
from fedsim.recording.safe_files import parse_json

FACTS, EXAMPLES = "data.json", "examples.npz"


def part(path: str) -> Dataset:
    """Load one client's examples, all of them for training, from a folder that `fedsim split` or `fedsim part` wrote.

    path: folder with `data.json`, the public facts, and `examples.npz`: `values` (N, *shape), uint8 or float32 in [0, 1], and
    `labels` (N,).
    """
    facts, examples = _read(Path(path))
    return Dataset(name=f"part:{path}", spec=facts.spec, class_names=facts.class_names, train=examples, test=_none(facts.spec))


def public(path: str) -> Dataset:
    """Load what the server knows of data that it does not have: the specification, and held-out examples where there are any.

    path: folder that `fedsim split` wrote, with the files that `part` reads. There are no training examples.
    """
    facts, examples = _read(Path(path))
    return Dataset(name=f"public:{path}", spec=facts.spec, class_names=facts.class_names, train=_none(facts.spec), test=examples)


def sizes(path: Path) -> list[int]:
    """Return the numbers of examples of all clients, ascending, from the public facts in `path`; they do not name clients."""
    return list(_facts(path).sizes)


def write_part(folder: Path, data: Dataset, examples: Examples) -> None:
    """Write `examples` of `data` as the `part` of one client. Raises ValueError if they are none."""
    if not len(examples):
        raise ValueError(f"{folder}: a client without examples cannot train; give it one at least")
    _write(folder, {"spec": asdict(data.spec), "class_names": data.class_names}, examples)


def write_public(folder: Path, data: Dataset, sizes: Sequence[int]) -> None:
    """Write what the server knows of `data`: the specification, the held-out examples, and how large the clients' parts are."""
    _write(folder, {"spec": asdict(data.spec), "class_names": data.class_names, "sizes": sorted(map(int, sizes))}, data.test)


def fitted(own: Dataset, like: Dataset) -> Dataset:
    """Return `own` with the specification of `like`, which a client receives from the server.

    Raises ValueError if examples have another shape, a label is none of its classes or numbers another one, or a table has
    other columns.
    """
    if own.spec.shape == like.spec.shape and own.spec.columns != like.spec.columns:
        raise ValueError(
            f"{own.name}: columns, their ranges and their categories must be those of {like.name}, and they are not; "
            "name them under ranges and categories, the same for all parties"
        )
    if own.spec.shape != like.spec.shape:
        raise ValueError(f"{own.name}: examples of shape {own.spec.shape} do not go with those of {like.name}, {like.spec.shape}")
    for examples in (own.train, own.test):
        if len(examples) and examples.labels.max() >= like.spec.num_classes:
            raise ValueError(f"{own.name}: label {examples.labels.max()} is none of the {like.spec.num_classes} classes")
    if _named(own) and _named(like) and (wrong := [a for a, b in zip(own.class_names, like.class_names, strict=False) if a != b]):
        raise ValueError(f"{own.name}: class {wrong[0]!r} has another number in {like.name}: {', '.join(like.class_names)}")
    return replace(own, spec=like.spec, class_names=like.class_names)


def renumbered(own: Dataset, like: Dataset) -> Dataset:
    """Return `own` with its classes numbered as in `like`, matched by name: a client that holds only some classes numbers them
    differently.

    Classes whose names are numbers stay as they are. Raises ValueError for a class that `like` does not have.
    """
    if not (_named(own) and _named(like)):
        return own
    if unknown := [name for name in own.class_names if name not in like.class_names]:
        raise ValueError(f"{own.name}: class {unknown[0]!r} is none of {like.name}: {', '.join(like.class_names)}")
    numbers = np.array([like.class_names.index(name) for name in own.class_names])
    train, test = (replace(examples, labels=numbers[examples.labels]) for examples in (own.train, own.test))
    return replace(own, train=train, test=test, class_names=like.class_names)


def _named(data: Dataset) -> bool:
    return data.class_names != tuple(map(str, range(len(data.class_names))))


def together(*parts: Examples) -> Examples:
    """Concatenate examples; pixels become float32 where any of the parts is float32."""
    values = [one.values for one in parts]
    if len({one.dtype for one in values}) > 1:
        values = [one.astype(np.float32) / 255 if one.dtype == np.uint8 else one for one in values]
    return Examples(values=np.concatenate(values), labels=np.concatenate([one.labels.astype(np.int64) for one in parts]))


class _Facts:
    def __init__(self, raw: dict[str, Any]) -> None:
        self.spec: DataSpec = TypeAdapter(DataSpec).validate_python(raw["spec"])
        self.class_names = tuple(map(str, raw["class_names"]))
        self.sizes: tuple[int, ...] = tuple(raw.get("sizes", ()))


def _facts(folder: Path) -> _Facts:
    path = folder / FACTS
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no data: it has no {FACTS}; make it with fedsim split or fedsim part")
    try:
        return _Facts(parse_json(read_text(path)))
    except (ValidationError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from None


def _read(folder: Path) -> tuple[_Facts, Examples]:
    facts, path = _facts(folder), folder / EXAMPLES
    arrays = read_arrays(path, ("values", "labels"))
    if arrays["labels"].dtype.kind not in "iu" or arrays["labels"].ndim != 1:
        raise ValueError(f"{path}: labels must be a row of integers, got {arrays['labels'].dtype}")
    try:
        examples = Examples(values=arrays["values"], labels=arrays["labels"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    _check(path, facts.spec, examples)
    return facts, examples


def _check(path: Path, spec: DataSpec, examples: Examples) -> None:
    values: Array = examples.values
    if values.shape[1:] != spec.shape or values.dtype not in (np.uint8, np.float32):
        raise ValueError(f"{path}: expected values of shape (N, {', '.join(map(str, spec.shape))}), got {values.shape}")
    if len(values) and values.dtype != np.uint8 and not (values.min() >= 0 and values.max() <= 1):
        raise ValueError(f"{path}: values must lie in [0, 1], got [{values.min()}, {values.max()}]")
    if len(values) and not 0 <= examples.labels.min() <= examples.labels.max() < spec.num_classes:
        raise ValueError(f"{path}: labels must be one of {spec.num_classes} classes, got {examples.labels.max()}")


def _none(spec: DataSpec) -> Examples:
    return Examples(values=np.zeros((0, *spec.shape), np.float32), labels=np.zeros(0, np.int64))


def _write(folder: Path, facts: dict[str, Any], examples: Examples) -> None:
    make_private(folder)
    with replacing(folder / EXAMPLES) as file:
        np.savez(file, values=examples.values, labels=examples.labels.astype(np.int64))
    write_json(folder / FACTS, facts)
