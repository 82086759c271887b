"""Encodings of a set of K positions out of 0 to N - 1; the smallest of three is used.

index: each position as an integer of 8, 16, 32 or 64 bits, as N requires.
mask:  one bit for each of the N positions.
gaps:  Elias-Fano coding (Elias 1974; Vigna 2013, "Quasi-succinct indices"). The upper bits of the ascending positions are
       coded as unary gaps in `high`, and the lower bits are stored in `low`. It takes about 2 + log2(N / K) bits per position,
       less than one bit above the entropy of random positions.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.recording.packing.bits import count_packed_bytes
from fedsim.recording.packing.bits import pack as pack_bits
from fedsim.recording.packing.bits import unpack as unpack_bits
from fedsim.recording.packing.parts import TENSOR_OVERHEAD_BYTES, TensorLike, check_vector

Positions = NDArray[np.int64]

POSITION_PARTS = ({"index"}, {"mask"}, {"high", "low"})


def pack(positions: Positions, size: int) -> dict[str, Tensor]:
    """Encode ascending positions (K,) below `size`, at least one, with the smallest of the three encodings.

    Returns {"index": ...}, {"mask": ...} or, for gaps, {"high": ..., "low": ...}.
    """
    count = len(positions)
    lower = _count_lower_bits(size, count)
    lengths = {"index": count * _find_type(size).itemsize, "mask": count_packed_bytes(1, size)}
    if lower:
        lengths["gaps"] = (
            TENSOR_OVERHEAD_BYTES + -(-_count_unary_bits(size, count, lower) // 8) + count_packed_bytes(lower, count)
        )
    match min(lengths, key=lambda way: lengths[way]):
        case "index":
            return {"index": torch.from_numpy(positions.astype(_find_type(size)))}
        case "mask":
            return {"mask": _make_bitmap(positions, size)}
        case _:
            high = _make_bitmap((positions >> lower) + np.arange(count), _count_unary_bits(size, count, lower))
            return {"high": high, "low": pack_bits(positions & ((1 << lower) - 1), lower)}


def unpack(parts: Mapping[str, Tensor], size: int) -> Positions:
    """Return the positions that `pack` encoded. Raises ValueError if there are none, they do not ascend or reach `size`."""
    if "index" in parts:
        found = parts["index"].numpy()
        if found.dtype.itemsize == 8 and len(found) and int(found.max()) >= size:
            raise ValueError(f"has position {found.max()}, but positions must be below {size}")
        positions = found.astype(np.int64)
    elif "mask" in parts:
        positions = np.flatnonzero(unpack_bits(parts["mask"], 1, size))
    else:
        positions = _decode_gaps(parts["high"], parts["low"], size)
    if not len(positions) or positions[-1] >= size or (positions[1:] <= positions[:-1]).any():
        raise ValueError(f"has {len(positions)} positions; there must be at least one, in ascending order, all below {size}")
    return positions


def check(parts: Mapping[str, TensorLike], size: int) -> None:
    """Raise ValueError if types or lengths of `parts` cannot be those of encoded positions below `size`."""
    if "index" in parts:
        check_vector("index", parts["index"], torch.from_numpy(np.empty(0, _find_type(size))).dtype, most=size)
    elif "mask" in parts:
        check_vector("mask", parts["mask"], torch.uint8, most=count_packed_bytes(1, size))
    else:
        check_vector("high", parts["high"], torch.uint8, most=count_packed_bytes(1, size))
        check_vector("low", parts["low"], torch.uint8, most=8 * size)


def _decode_gaps(high: Tensor, low: Tensor, size: int) -> Positions:
    """Decode positions below `size` from Elias-Fano coding."""
    steps = np.flatnonzero(np.unpackbits(high.numpy()))
    count = len(steps)
    lower = _count_lower_bits(size, count)
    if len(high) != -(-_count_unary_bits(size, count, lower) // 8):
        raise ValueError(f"has {len(high)} bytes of gaps for {count} positions among {size} values")
    upper: Positions = (steps - np.arange(count)) << lower
    return upper | unpack_bits(low, lower, count).astype(np.int64)


def _count_lower_bits(size: int, count: int) -> int:
    """Return the number of lower bits per position in Elias-Fano coding; 0 if over half of all positions are coded."""
    return max(0, (size // count).bit_length() - 1) if count else 0


def _count_unary_bits(size: int, count: int, lower: int) -> int:
    """Return the number of bits of the unary code of the upper bits of `count` positions below `size`."""
    return count + ((size - 1) >> lower)


def _make_bitmap(positions: Positions, size: int) -> Tensor:
    truth = np.zeros(size, bool)
    truth[positions] = True
    return torch.from_numpy(np.packbits(truth))


def _find_type(size: int) -> np.dtype[Any]:
    """Return the smallest unsigned integer type that holds every position below `size`."""
    return np.min_scalar_type(max(0, size - 1))
