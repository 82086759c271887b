"""Tensors as the bit patterns of their entries, and small whole numbers in as few bits as they need."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.recording.files import DTYPES

Bits = NDArray[Any]
"""Unsigned integers (N,), one for each entry of a tensor, as wide as the entry: equal where its bits are."""


def bits_of(tensor: Tensor) -> Bits:
    """The bit patterns of a tensor, in row-major order; in its own memory where it has that order.

    Raises ValueError for a type that a recording cannot hold.
    """
    if tensor.dtype not in DTYPES:
        raise ValueError(f"a tensor of type {tensor.dtype} cannot be packed")
    kind = f"u{tensor.element_size()}"
    if not tensor.numel():  # of which torch may give no view
        return np.empty(0, kind)
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().view(kind)


def tensor_of(bits: Bits, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `bits_of`, in the same memory."""
    return torch.from_numpy(bits.view(np.uint8)).view(dtype).reshape(shape)


def width_of(count: int) -> int:
    """Bits that tell `count` things apart: none for one thing."""
    return max(0, count - 1).bit_length()


def packed_bytes(width: int, count: int) -> int:
    """Length of what `pack` makes of `count` numbers."""
    return width * -(-count // 8)


def pack(numbers: NDArray[Any], width: int) -> Tensor:
    """Whole numbers (N,) below 2**width as bytes: all their lowest bits, eight a byte, then all the next ones, and so on."""
    planes = [np.packbits((numbers & numbers.dtype.type(1 << place)) != 0) for place in range(width)]
    return torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *planes]))


def unpack(packed: Tensor, width: int, count: int) -> NDArray[Any]:
    """The inverse of `pack`. Raises ValueError where `packed` has another length than `count` numbers make."""
    if len(packed) != packed_bytes(width, count):
        raise ValueError(f"has {len(packed)} bytes for {count} numbers of {width} bits, which take {packed_bytes(width, count)}")
    kind = np.min_scalar_type((1 << width) - 1)
    numbers = np.zeros(count, kind)
    for place, plane in enumerate(packed.numpy().reshape(width, -(-count // 8))):
        numbers |= np.unpackbits(plane, count=count).astype(kind, copy=False) << kind.type(place)
    return numbers
