"""Bit patterns of tensors, and packing of small natural numbers into as few bits as they need."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.recording.files import DTYPES

Bits = NDArray[Any]
"""Unsigned integers (N,), one for each entry of a tensor, as wide as the entry: equal where its bits are."""


def bits_of(tensor: Tensor) -> Bits:
    """Return the bit patterns of a tensor in row-major order, without a copy where its memory has that order.

    Raises ValueError for a type that a recording cannot hold.
    """
    if tensor.dtype not in DTYPES:
        raise ValueError(f"a tensor of type {tensor.dtype} cannot be packed")
    kind = f"u{tensor.element_size()}"
    if not tensor.numel():  # of which torch may give no view
        return np.empty(0, kind)
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().view(kind)


def tensor_of(bits: Bits, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor with these bit patterns, in the same memory; the inverse of `bits_of`."""
    return torch.from_numpy(bits.view(np.uint8)).view(dtype).reshape(shape)


def width_of(count: int) -> int:
    """Return the number of bits that distinguish `count` values; 0 for one value."""
    return max(0, count - 1).bit_length()


def packed_bytes(width: int, count: int) -> int:
    """Return the number of bytes that `pack` makes of `count` numbers."""
    return width * -(-count // 8)


def pack(numbers: NDArray[Any], width: int) -> Tensor:
    """Pack natural numbers (N,) below 2**width into bytes, bit plane by bit plane: the lowest bits of all numbers first."""
    planes = [np.packbits((numbers & numbers.dtype.type(1 << place)) != 0) for place in range(width)]
    return torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *planes]))


def unpack(packed: Tensor, width: int, count: int) -> NDArray[Any]:
    """Return the `count` numbers that `pack` packed. Raises ValueError where `packed` has another length."""
    if len(packed) != packed_bytes(width, count):
        raise ValueError(f"has {len(packed)} bytes for {count} numbers of {width} bits, which take {packed_bytes(width, count)}")
    kind = np.min_scalar_type((1 << width) - 1)
    numbers = np.zeros(count, kind)
    for place, plane in enumerate(packed.numpy().reshape(width, -(-count // 8))):
        numbers |= np.unpackbits(plane, count=count).astype(kind, copy=False) << kind.type(place)
    return numbers
