"""Every entry of a tensor by a table of the few values that it has; as it is where that saves nothing.

What a quantiser sends takes the true number of bits: of QSGD's 2 s + 1 values a tensor each takes ceil(log2(2 s + 1)), and of a
sign with its scale one. The values themselves are in the table, so that nothing of the quantiser need be known.
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
    """By a table of at most `most` values a tensor: `NAME/palette` and `NAME/codes`, or `NAME/dense`."""
    packed: dict[str, Tensor] = {}
    for name, tensor in update.items():
        packed |= joined(name, values.tabled(bits_of(tensor), tensor.dtype, most) or {"dense": tensor})
    return packed


def decode(packed: Tensors, start: Mapping[str, TensorLike], most: int | None = None) -> dict[str, Tensor]:
    """The inverse. Raises ValueError for what gives no update of the shapes of `start`."""
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
    """Raises ValueError where types and shapes alone tell that this is no update of such weights."""
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
