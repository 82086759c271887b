"""Names and checks of the tensors that a codec makes of one parameter."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from fedsim.recording.files import DTYPES
from fedsim.recording.safe_files import shorten

SEPARATOR = "/"
"""Before the name of a part, which holds none: whatever the parameter's own name holds, the last one separates."""
TENSOR_OVERHEAD_BYTES = 160
"""About how many bytes a tensor costs beside its content, in a message and in a file: what it saves must be more."""


class TensorLike(Protocol):
    """A tensor, or the description of one in a file."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


T = TypeVar("T")


def joined(name: str, parts: Mapping[str, T]) -> dict[str, T]:
    """Return the parts of a parameter under the names that they have in a message."""
    return {f"{name}{SEPARATOR}{part}": tensor for part, tensor in parts.items()}


def apart(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return the parts of all parameters by parameter. Raises ValueError for a name that `joined` does not make."""
    found: dict[str, dict[str, T]] = {}
    for key, tensor in tensors.items():
        name, separator, part = key.rpartition(SEPARATOR)
        if not separator:
            raise ValueError(f"tensor {shorten(key)} is no part of a packed update")
        found.setdefault(name, {})[part] = tensor
    return found


@contextmanager
def about(name: str) -> Iterator[None]:
    """Put the name of the parameter before what a ValueError within says of it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"tensor {name!r} {error}") from None


def check_names(got: Mapping[str, object], weights: Mapping[str, object]) -> None:
    """Raise ValueError where an update has other names than the weights."""
    if names := sorted(got.keys() ^ weights.keys()):
        raise ValueError(f"its names differ from the weights of its round, the first: {shorten(names[0])}")


def check_shape(got: TensorLike, weight: TensorLike) -> None:
    """Raise ValueError where a tensor of an update has another shape than its weight."""
    if tuple(got.shape) != tuple(weight.shape):
        raise ValueError(f"has shape {shorten(tuple(got.shape))}, and the one that was sent {tuple(weight.shape)}")


def check_kind(got: TensorLike, weight: TensorLike) -> None:
    """Raise ValueError where one of the two holds integers, and the other does not."""
    if got.dtype.is_floating_point != weight.dtype.is_floating_point:
        raise ValueError(f"is of type {got.dtype}, and the one that was sent of {weight.dtype}; send it back as {weight.dtype}")


def check_vector(part: str, got: TensorLike, dtype: torch.dtype | None, *, least: int = 0, most: int) -> int:
    """Return the length of a part, a vector of type `dtype`, or of any type that can be recorded.

    Raises ValueError for others.
    """
    if len(got.shape) != 1 or not least <= got.shape[0] <= most:
        fitting = f"{most}" if least == most else f"{least} to {most}"
        raise ValueError(f"has {part} of shape {shorten(tuple(got.shape))}, where {fitting} values would fit")
    if got.dtype != dtype and (dtype is not None or got.dtype not in DTYPES):
        raise ValueError(f"has {part} of type {got.dtype}{'' if dtype is None else f', not {dtype}'}")
    return got.shape[0]
