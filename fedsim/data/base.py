"""Classes of data sets: examples with values in [0, 1], labels, and a public specification."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.recording.observation import DataSpec

Array = NDArray[Any]

MAX_CLASSES = 100_000
"""Largest number of classes of a data set."""
HASHED_EXAMPLES = 4096
"""Number of examples that are hashed at a time if the array is not contiguous."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """An ordered set of examples. Indexing returns tensors (x, y): x float32 in [0, 1], y int64.

    values: (N, *shape), uint8 pixels or float32 in [0, 1].
    labels: (N,) integers.
    groups: further attributes by name, such as the person or the hospital, (N,) values each. Only partitions use them.
    """

    values: Array
    labels: Array
    groups: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {"values": len(self.values), "labels": len(self.labels)}
        lengths |= {f"groups[{name!r}]": len(column) for name, column in self.groups.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{length} {name}" for name, length in lengths.items())
            raise ValueError(f"examples: values, labels and groups must have equal lengths, got {shown}")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Any) -> tuple[Tensor, Tensor]:
        """Return (x, y) of the chosen examples, contiguous as networks with `view` need: float32 in [0, 1], and int64."""
        values = self.values[indices]
        scale = 255 if values.dtype == np.uint8 else 1
        x = torch.from_numpy(values.astype(np.float32, order="C") / scale)
        return x, torch.from_numpy(self.labels[indices].astype(np.int64))

    def select(self, chosen: Array) -> "Examples":
        """Return the examples chosen by an index array or a mask, with their groups."""
        groups = {name: column[chosen] for name, column in self.groups.items()}
        return Examples(values=self.values[chosen], labels=self.labels[chosen], groups=groups)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A data set with training and held-out (test) examples. Whether they are disjoint is not checked.

    name: name for messages. class_names: names of the classes in the order of their numbers.
    Raises ValueError if the examples do not agree with `spec` in shape, type, range or labels, or if there are more class names
    than `spec.num_classes`.
    """

    name: str
    spec: DataSpec
    class_names: tuple[str, ...]
    train: Examples
    test: Examples

    def __post_init__(self) -> None:
        if len(self.class_names) > self.spec.num_classes:
            raise ValueError(
                f"{self.name}: {len(self.class_names)} class_names exceed spec.num_classes = {self.spec.num_classes}"
            )
        for side, examples in (("train", self.train), ("test", self.test)):
            if not isinstance(examples, Examples):
                raise ValueError(f"{self.name}: {side} must be Examples, got {type(examples).__name__}")
            _check_examples(f"{self.name}: {side}", examples, self.spec)

    def compute_hash(self) -> str:
        """Return a SHA-256 digest (hexadecimal) of the values and labels of the training examples, in their order.

        The hash is stored with the indices of the examples that clients used, so that scoring recognises the data set.
        """
        return self._content_hash

    @cached_property
    def _content_hash(self) -> str:
        values = self.train.values
        digest = hashlib.sha256(str(values.shape).encode())
        step = len(values) if values.flags.c_contiguous else HASHED_EXAMPLES
        for start in range(0, len(values), step or 1):
            digest.update(np.ascontiguousarray(values[start : start + step]).data)
        digest.update(self.train.labels.astype(np.int64).tobytes())
        return digest.hexdigest()


def _check_examples(where: str, examples: Examples, spec: DataSpec) -> None:
    """Raise ValueError unless the examples agree with `spec`. where: data set and part (train or test), for the message."""
    values, labels = examples.values, examples.labels
    shape = ", ".join(map(str, spec.shape))
    if values.shape[1:] != spec.shape:
        raise ValueError(f"{where}.values have shape {values.shape}; by spec.shape they must have shape (N, {shape})")
    if values.dtype not in (np.uint8, np.float32):
        raise ValueError(f"{where}.values must be uint8 pixels or float32 in [0, 1], got {values.dtype}; use astype")
    if values.dtype == np.float32 and values.size and not (values.min() >= 0 and values.max() <= 1):
        raise ValueError(f"{where}.values must lie in [0, 1], got values from {values.min()} to {values.max()}; rescale them")
    if labels.ndim != 1 or (labels.size and not np.issubdtype(labels.dtype, np.integer)):
        raise ValueError(f"{where}.labels must be integers of shape (N,), got {labels.dtype} of shape {labels.shape}")
    if len(labels) and not (labels.min() >= 0 and labels.max() < spec.num_classes):
        worst = labels.min() if labels.min() < 0 else labels.max()
        raise ValueError(f"{where}.labels must be from 0 to spec.num_classes - 1 = {spec.num_classes - 1}, got {worst}")


def hold_out_every_fifth(name: str, spec: DataSpec, class_names: tuple[str, ...], examples: Examples) -> Dataset:
    """Build a data set in which the fifth, tenth, ... example is held out. Raises ValueError for fewer than five examples."""
    if len(examples) < 5:
        raise ValueError(
            f"{name}: every fifth example is held out, but there are only {len(examples)}; give at least 5, or name a file of "
            "held-out examples by the argument test"
        )
    held_out = np.arange(len(examples)) % 5 == 4
    train, test = examples.select(~held_out), examples.select(held_out)
    return Dataset(name=name, spec=spec, class_names=class_names, train=train, test=test)
