"""Codec `sparse`: the nonzero entries of a tensor with their positions or, if that is smaller, the whole tensor.

An entry counts as zero if all its bits are zero; -0.0 is sent like any other value.
"""

from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from defenses.base import Tensors
from fedsim.recording.packing import positions, values
from fedsim.recording.packing.bits import to_bits, to_tensor
from fedsim.recording.packing.parts import (
    PACKED_ADVICE,
    TENSOR_OVERHEAD_BYTES,
    TensorLike,
    check_parts,
    check_vector,
    join_parts,
    name_parameter,
    split_parts,
)

SPARSE_PARTS = tuple(what | where for what in ({"values"}, *values.VALUE_PARTS) for where in positions.POSITION_PARTS)


def encode(update: Tensors) -> dict[str, Tensor]:
    """Return a dict of the tensors to send: for each parameter NAME, its nonzero values and their positions.

    Values are `NAME/values`, or a table `NAME/palette` of the distinct values and indices `NAME/codes` into it; without
    `NAME/codes` if all are equal. Positions are `NAME/index`, or `NAME/mask`, or `NAME/high` and `NAME/low`, see `positions`.
    If all entries are zero, `NAME/values` is empty and no positions are sent. If the whole tensor takes no more space, or has no
    entries, it is sent as `NAME/dense`.
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in update.items():
        packed |= join_parts(name, _encode_tensor(tensor))
    return packed


def _encode_tensor(tensor: Tensor) -> dict[str, Tensor]:
    bits = to_bits(tensor)
    at = np.flatnonzero(bits != 0)
    chosen = bits[at]
    parts = values.encode_table(chosen, tensor.dtype) or {"values": to_tensor(chosen, tensor.dtype, (-1,))}
    if len(at):
        parts |= positions.pack(at, len(bits))
    return parts if len(bits) and values.count_bytes(parts) < tensor.nbytes + TENSOR_OVERHEAD_BYTES else {"dense": tensor}


def decode(packed: Tensors, start: Mapping[str, TensorLike]) -> dict[str, Tensor]:
    """Return the update (tensors by parameter name) that was encoded.

    start: weights, of which only names and shapes are used. Raises ValueError if the parts do not give an update of these shapes.
    """
    check_fit(packed, start)
    update = {}
    for name, parts in split_parts(packed).items():
        with name_parameter(name):
            update[name] = _decode_tensor(parts, tuple(start[name].shape))
    return update


def _decode_tensor(parts: Tensors, shape: tuple[int, ...]) -> Tensor:
    if "dense" in parts:
        return parts["dense"]
    some = parts.get("values", parts.get("palette"))
    assert some is not None
    bits = np.zeros(prod(shape), f"u{some.element_size()}")
    if len(parts) > 1:
        at = positions.unpack(parts, len(bits))
        decoded = to_bits(parts["values"]) if "values" in parts else values.decode_table(parts, len(at))
        if len(decoded) != len(at):
            raise ValueError(f"is packed with {len(decoded)} values for {len(at)} positions; {PACKED_ADVICE}")
        bits[at] = decoded
    return to_tensor(bits, some.dtype, shape)


def find_sent(packed: Tensors, start: Mapping[str, TensorLike]) -> dict[str, Tensor]:
    """Return a boolean mask of the nonzero entries by parameter name, also for tensors that were sent whole.

    start: as in `decode`.
    """
    masks = {name: (to_bits(tensor) != 0, tuple(tensor.shape)) for name, tensor in decode(packed, start).items()}
    return {name: to_tensor(mask.view(np.uint8), torch.bool, shape) for name, (mask, shape) in masks.items()}


def check_fit(described: Mapping[str, TensorLike], weights: Mapping[str, TensorLike]) -> None:
    """Raise ValueError if names, types or shapes of the parts cannot belong to an update of these weights."""
    check_parts(described, weights, "sparse", _check)


def _check(parts: Mapping[str, TensorLike], size: int) -> bool:
    if parts.keys() == {"values"}:
        check_vector("values", parts["values"], None, maximum=0)
        return True
    if parts.keys() not in SPARSE_PARTS:
        return False
    positions.check(parts, size)
    if "values" in parts:
        check_vector("values", parts["values"], None, maximum=size)
    else:
        values.check_table(parts, maximum=size, min_count=0, max_count=size)
    return True
