"""Codecs `bits` and `levels`: each tensor as a table of its distinct values and an index per entry, or unchanged.

A table of `bits` has at most 2 values; `levels` has tables of any size that saves space.

Quantised updates take their true number of bits: with QSGD's 2 s + 1 values an entry takes ceil(log2(2 s + 1)) bits; with
signs times one scale it takes one bit. The values are in the table, so that the codec works for any quantiser.
"""

from collections.abc import Mapping
from math import prod

from torch import Tensor

from defenses.base import Tensors
from fedsim.recording.packing import values
from fedsim.recording.packing.bits import to_bits, to_tensor
from fedsim.recording.packing.parts import TensorLike, check_names, check_shape, join_parts, name_parameter, split_parts
from fedsim.recording.safe_files import shorten


def encode(update: Tensors, most: int | None = None) -> dict[str, Tensor]:
    """Encode each tensor as `NAME/palette` (at most `most` values) and `NAME/codes`, or as `NAME/dense` if that saves nothing."""
    packed: dict[str, Tensor] = {}
    for name, tensor in update.items():
        packed |= join_parts(name, values.encode_table(to_bits(tensor), tensor.dtype, most) or {"dense": tensor})
    return packed


def decode(packed: Tensors, start: Mapping[str, TensorLike], most: int | None = None) -> dict[str, Tensor]:
    """Decode an update. Raises ValueError if the parts do not give an update of the shapes of the weights `start`.

    most: largest number of values that a tensor's table may have; None for any number. A larger table raises ValueError, too.
    """
    check_fit(packed, start, most)
    update = {}
    for name, parts in split_parts(packed).items():
        shape = tuple(start[name].shape)
        with name_parameter(name):
            if "dense" in parts:
                update[name] = parts["dense"]
            else:
                update[name] = to_tensor(values.decode_table(parts, prod(shape)), parts["palette"].dtype, shape)
    return update


def check_fit(described: Mapping[str, TensorLike], weights: Mapping[str, TensorLike], most: int | None = None) -> None:
    """Raise ValueError if names, types or shapes of the parts cannot belong to an update of these weights.

    most: largest number of values that a tensor's table may have; None for any number.
    """
    found = split_parts(described)
    check_names(found, weights)
    for name, parts in found.items():
        size = prod(weights[name].shape)
        with name_parameter(name):
            if parts.keys() == {"dense"}:
                check_shape(parts["dense"], weights[name])
            elif parts.keys() in values.VALUE_PARTS:
                values.check(parts, most=size if most is None else min(most, size), least_count=size, most_count=size)
            else:
                raise ValueError(f"has the parts {shorten(sorted(parts))}, which this codec does not make")
