"""Codecs `bits` and `levels`: each tensor as a table of its distinct values and an index per entry, or unchanged.

A table of `bits` has at most 2 values; `levels` has tables of any size that saves space. The values are in the table, so that
the codecs work for any quantiser.
"""

from collections.abc import Mapping
from math import prod

from torch import Tensor

from defenses.base import Tensors
from fedsim.recording.packing import values
from fedsim.recording.packing.bits import to_bits, to_tensor
from fedsim.recording.packing.parts import TensorLike, check_parts, join_parts, name_parameter, split_parts


def encode(update: Tensors, max_values: int | None = None) -> dict[str, Tensor]:
    """Return a dict of the tensors to send: for each parameter NAME, a table `NAME/palette` and indices `NAME/codes` into it.

    `NAME/codes` is left out if all values are equal. A tensor with over `max_values` distinct values, or which would not become
    smaller, is sent unchanged as `NAME/dense`.
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in update.items():
        packed |= join_parts(name, values.encode_table(to_bits(tensor), tensor.dtype, max_values) or {"dense": tensor})
    return packed


def decode(packed: Tensors, start: Mapping[str, TensorLike], max_values: int | None = None) -> dict[str, Tensor]:
    """Return the update (tensors by parameter name) that was encoded.

    start: weights, of which only names and shapes are used. Raises ValueError if the parts do not give an update of these shapes.
    max_values: largest number of values that a tensor's table may have; None for any number. A larger table raises ValueError.
    """
    check_fit(packed, start, max_values)
    update = {}
    for name, parts in split_parts(packed).items():
        shape = tuple(start[name].shape)
        with name_parameter(name):
            if "dense" in parts:
                update[name] = parts["dense"]
            else:
                update[name] = to_tensor(values.decode_table(parts, prod(shape)), parts["palette"].dtype, shape)
    return update


def check_fit(described: Mapping[str, TensorLike], weights: Mapping[str, TensorLike], max_values: int | None = None) -> None:
    """Raise ValueError if names, types or shapes of the parts cannot belong to an update of these weights.

    max_values: largest number of values that a tensor's table may have; None for any number.
    """

    def check(parts: Mapping[str, TensorLike], size: int) -> bool:
        if parts.keys() not in values.VALUE_PARTS:
            return False
        values.check(parts, maximum=size if max_values is None else min(max_values, size), min_count=size, max_count=size)
        return True

    check_parts(described, weights, "levels" if max_values is None else "bits", check)
