"""Parts, the tensors that a codec makes of one parameter: their names on the wire, and checks of types and shapes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Protocol, TypeVar

import torch

from fedsim.recording.files import DTYPES
from fedsim.recording.safe_files import shorten

PART_SEPARATOR = "/"
"""Separator between the names of parameter and part. Names of parts do not contain it, so that the last one separates."""
TENSOR_OVERHEAD_BYTES = 160
"""Approximate number of bytes that a tensor takes in a message besides its content."""


class TensorLike(Protocol):
    """A tensor, or the type and shape of one that a file declares."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


T = TypeVar("T")

PACKED_ADVICE = "copy the recording again, or install the server's version of fedleak on the client that sent this"
"""Advice for tensors that no codec writes, used in error messages; they come from a damaged file or from another program."""


def join_parts(name: str, parts: Mapping[str, T]) -> dict[str, T]:
    """Return the parts of a parameter under their names on the wire, `NAME/PART`."""
    return {f"{name}{PART_SEPARATOR}{part}": tensor for part, tensor in parts.items()}


def split_parts(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return a dict from parameter to a dict from part to tensor, of tensors called `NAME/PART`.

    NAME may contain "/", so the last one separates. Raises ValueError for a name without "/".
    """
    parts: dict[str, dict[str, T]] = {}
    for key, tensor in tensors.items():
        name, separator, part = key.rpartition(PART_SEPARATOR)
        if not separator:
            raise ValueError(
                f"the name of tensor {shorten(key)} has no {PART_SEPARATOR!r}, but a packed update names its tensors "
                f"PARAMETER{PART_SEPARATOR}PART; {PACKED_ADVICE}"
            )
        parts.setdefault(name, {})[part] = tensor
    return parts


@contextmanager
def name_parameter(name: str) -> Iterator[None]:
    """Prepend the name of the parameter to the message of a ValueError that is raised within the `with` block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"tensor {name!r} {error}") from None


def check_names(got: Mapping[str, object], weights: Mapping[str, object]) -> None:
    """Raise ValueError if the names of an update differ from those of the weights."""
    if missing := sorted(weights.keys() - got.keys()):
        raise ValueError(f"the update lacks tensor {shorten(missing[0])} of the weights sent in this round; {PACKED_ADVICE}")
    if unknown := sorted(got.keys() - weights.keys()):
        raise ValueError(f"the update has tensor {shorten(unknown[0])}, which the weights of its round lack; {PACKED_ADVICE}")


def check_shape(got: TensorLike, weight: TensorLike) -> None:
    """Raise ValueError if the shape of a tensor of an update differs from that of the weight."""
    if tuple(got.shape) != tuple(weight.shape):
        raise ValueError(f"has shape {shorten(tuple(got.shape))}, but the weight that was sent has {tuple(weight.shape)}")


def check_kind(got: TensorLike, weight: TensorLike) -> None:
    """Raise ValueError if one of the two tensors has a floating point type and the other has not."""
    if got.dtype.is_floating_point != weight.dtype.is_floating_point:
        raise ValueError(f"has type {got.dtype}, but the weight that was sent has {weight.dtype}; send it back as {weight.dtype}")


def check_vector(part: str, got: TensorLike, dtype: torch.dtype | None, *, minimum: int = 0, maximum: int) -> int:
    """Return the length of a part of a codec's output, checked to be a vector of type `dtype` (None: any type in `DTYPES`).

    part: its name, for messages. Raises ValueError if it has another type or not one dimension, or its length is not in
    `minimum` to `maximum`, both included.
    """
    if len(got.shape) != 1 or not minimum <= got.shape[0] <= maximum:
        expected = f"{maximum}" if minimum == maximum else f"{minimum} to {maximum}"
        raise ValueError(
            f"is packed with {part!r} of shape {shorten(tuple(got.shape))}, which must be a vector of {expected} values; "
            f"{PACKED_ADVICE}"
        )
    if got.dtype != dtype and (dtype is not None or got.dtype not in DTYPES):
        expected = "floating-point, integer or bool" if dtype is None else str(dtype)
        raise ValueError(f"is packed with {part!r} of type {got.dtype}, which must be {expected}; {PACKED_ADVICE}")
    return got.shape[0]


def check_parts(
    described: Mapping[str, TensorLike],
    weights: Mapping[str, TensorLike],
    codec: str,
    check: Callable[[Mapping[str, TensorLike], int], bool],
) -> None:
    """Raise ValueError if names, types or shapes of the parts cannot belong to an update of these weights.

    codec: its name, for messages. check: function of the parts of one parameter and the parameter's number of values. It raises
    ValueError for a part of a wrong type or shape, and returns whether the codec writes this combination of parts. Tensors that
    were sent whole, as `dense`, are checked here.
    """
    packed = split_parts(described)
    check_names(packed, weights)
    for name, parts in packed.items():
        with name_parameter(name):
            if parts.keys() == {"dense"}:
                check_shape(parts["dense"], weights[name])
            elif not check(parts, prod(weights[name].shape)):
                raise ValueError(
                    f"is packed as {shorten(sorted(parts))}, a combination that codec {codec!r} does not write; {PACKED_ADVICE}"
                )
