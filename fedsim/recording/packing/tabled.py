"""Codec that sends a table of the distinct values of each tensor and an index for each entry, where that is smaller.

The output of a quantiser takes its true number of bits: QSGD's 2 s + 1 values a tensor take ceil(log2(2 s + 1)) bits each, and
a sign with its scale takes one. The codec needs to know nothing of the quantiser, as the table holds the values.
"""

from collections.abc import Mapping
from math import prod

from torch import Tensor

from fedsim.recording.packing import values
from fedsim.recording.packing.bits import bits_of, tensor_of
from fedsim.recording.packing.parts import TensorLike, about, apart, check_names, check_shape, joined
from fedsim.recording.safe_files import shorten

Tensors = Mapping[str, Tensor]


def encode(update: Tensors, most: int | None = None) -> dict[str, Tensor]:
    """Encode each tensor as `NAME/palette`, at most `most` values, and `NAME/codes`, or unchanged as `NAME/dense`."""
    packed: dict[str, Tensor] = {}
    for name, tensor in update.items():
        packed |= joined(name, values.tabled(bits_of(tensor), tensor.dtype, most) or {"dense": tensor})
    return packed


def decode(packed: Tensors, start: Mapping[str, TensorLike], most: int | None = None) -> dict[str, Tensor]:
    """Return the update that `encode` encoded. Raises ValueError for tensors that encode no update of the shapes of `start`."""
    fits(packed, start, most)
    update = {}
    for name, parts in apart(packed).items():
        shape = tuple(start[name].shape)
        with about(name):
            if "dense" in parts:
                update[name] = parts["dense"]
            else:
                update[name] = tensor_of(values.looked_up(parts, prod(shape)), parts["palette"].dtype, shape)
    return update


def fits(described: Mapping[str, TensorLike], weights: Mapping[str, TensorLike], most: int | None = None) -> None:
    """Raise ValueError where names, types and shapes show that this is no update of such weights."""
    found = apart(described)
    check_names(found, weights)
    for name, parts in found.items():
        size = prod(weights[name].shape)
        with about(name):
            if parts.keys() == {"dense"}:
                check_shape(parts["dense"], weights[name])
            elif parts.keys() in values.WAYS:
                values.check(parts, most=size if most is None else min(most, size), least_count=size, most_count=size)
            else:
                raise ValueError(f"is sent as {shorten(sorted(parts))}")
