"""Bit patterns of tensor entries, and packing of small integers into as few bits as they need."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.recording.files import DTYPES
from fedsim.recording.packing.parts import PACKED_ADVICE

Bits = NDArray[Any]
"""Bit patterns (N,) of the entries of a tensor, as unsigned integers of the same width."""


def to_bits(tensor: Tensor) -> Bits:
    """Return the bit patterns (N,) of a tensor's N entries in row-major order, as unsigned integers of the entries' width.

    They may share the memory of the tensor. Raises ValueError for a type that a recording cannot hold.
    """
    if tensor.dtype not in DTYPES:
        raise ValueError(f"a tensor of type {tensor.dtype} cannot be packed; use one of {', '.join(map(str, DTYPES))}")
    kind = f"u{tensor.element_size()}"
    if not tensor.numel():  # torch may not view an empty tensor as bytes
        return np.empty(0, kind)
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().view(kind)


def to_tensor(bits: Bits, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor with these bit patterns, sharing their memory. The inverse of `to_bits`."""
    return torch.from_numpy(bits.view(np.uint8)).view(dtype).reshape(shape)


def compute_width(count: int) -> int:
    """Return the number of bits that distinguish `count` values; 0 for one value or none."""
    return max(0, count - 1).bit_length()


def count_packed_bytes(width: int, count: int) -> int:
    """Return the number of bytes that `pack` makes of `count` numbers of `width` bits each."""
    return width * -(-count // 8)


def pack(numbers: NDArray[Any], width: int) -> Tensor:
    """Pack integers (N,) in 0 to 2**width - 1 into a uint8 tensor: first all lowest bits, then all second bits, and so on.

    Eight bits go into one byte. Each of the `width` groups begins with a new byte.
    """
    planes = [np.packbits((numbers & numbers.dtype.type(1 << place)) != 0) for place in range(width)]
    return torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *planes]))


def unpack(packed: Tensor, width: int, count: int) -> NDArray[Any]:
    """Return the `count` integers (count,) that `pack` packed. Raises ValueError if `packed` has the wrong length."""
    if len(packed) != (expected := count_packed_bytes(width, count)):
        raise ValueError(
            f"is packed with {len(packed)} bytes for {count} numbers of {width} bits each, which take {expected} bytes; "
            f"{PACKED_ADVICE}"
        )
    kind = np.min_scalar_type((1 << width) - 1)
    numbers = np.zeros(count, kind)
    for place, plane in enumerate(packed.numpy().reshape(width, -(-count // 8))):
        numbers |= np.unpackbits(plane, count=count).astype(kind, copy=False) << kind.type(place)
    return numbers
