"""Encodings of a set of K positions out of 0 to N - 1. `pack` uses the encoding that takes least space.

index: each position as an integer of 8, 16, 32 or 64 bits, as N requires.
mask:  one bit for each of the N positions.
gaps:  Elias-Fano coding (Elias 1974; Vigna 2013, "Quasi-succinct indices"). The upper bits of the ascending positions are
       coded as unary gaps in `high`, and the lower bits are stored in `low`.
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
from fedsim.recording.packing.parts import PACKED_ADVICE, TENSOR_OVERHEAD_BYTES, TensorLike, check_vector

Positions = NDArray[np.int64]

POSITION_PARTS = ({"index"}, {"mask"}, {"high", "low"})


def pack(positions: Positions, size: int) -> dict[str, Tensor]:
    """Encode positions (K,), strictly ascending and below `size`, at least one, in the way that takes least space.

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
    """Return the positions that `pack` encoded, as a NumPy array (K,) of int64.

    Raises ValueError unless there is at least one position, the positions strictly ascend, and all are below `size`.
    """
    if "index" in parts:
        indices = parts["index"].numpy()
    elif "mask" in parts:
        indices = np.flatnonzero(unpack_bits(parts["mask"], 1, size))
    else:
        indices = _decode_gaps(parts["high"], parts["low"], size)
    if not len(indices):
        raise ValueError(f"is packed without positions, but needs at least one; {PACKED_ADVICE}")
    if (highest := int(indices.max())) >= size:  # checked before the conversion, in which a uint64 could overflow
        raise ValueError(f"is packed with position {highest}, but it has only {size} entries, counted from 0; {PACKED_ADVICE}")
    positions = indices.astype(np.int64)
    if len(at := np.flatnonzero(positions[1:] <= positions[:-1])):
        first, second = positions[at[0]], positions[at[0] + 1]
        raise ValueError(f"is packed with position {second} after {first}, but positions must ascend; {PACKED_ADVICE}")
    return positions


def check(parts: Mapping[str, TensorLike], size: int) -> None:
    """Raise ValueError if a part has another type than `pack` makes, or is longer than positions below `size` can need."""
    if "index" in parts:
        check_vector("index", parts["index"], torch.from_numpy(np.empty(0, _find_type(size))).dtype, maximum=size)
    elif "mask" in parts:
        check_vector("mask", parts["mask"], torch.uint8, maximum=count_packed_bytes(1, size))
    else:
        check_vector("high", parts["high"], torch.uint8, maximum=count_packed_bytes(1, size))
        check_vector("low", parts["low"], torch.uint8, maximum=8 * size)


def _decode_gaps(high: Tensor, low: Tensor, size: int) -> Positions:
    """Decode positions from Elias-Fano coding; `size` is what `pack` was given. Raises ValueError if lengths do not fit."""
    steps = np.flatnonzero(np.unpackbits(high.numpy()))
    count = len(steps)
    lower = _count_lower_bits(size, count)
    needed = -(-_count_unary_bits(size, count, lower) // 8)
    if len(high) != needed:
        raise ValueError(
            f"is packed with {len(high)} bytes in 'high', the upper bits of positions, but {count} positions among {size} "
            f"entries take {needed}; {PACKED_ADVICE}"
        )
    upper: Positions = (steps - np.arange(count)) << lower
    return upper | unpack_bits(low, lower, count).astype(np.int64)


def _count_lower_bits(size: int, count: int) -> int:
    """Return the number of lower bits per position in Elias-Fano coding of `count` positions below `size`; at least 0."""
    return max(0, (size // count).bit_length() - 1) if count else 0


def _count_unary_bits(size: int, count: int, lower: int) -> int:
    """Return the length of the unary code of the upper bits: one bit per position, and one per upper value from 1 on."""
    return count + ((size - 1) >> lower)


def _make_bitmap(positions: Positions, size: int) -> Tensor:
    truth = np.zeros(size, bool)
    truth[positions] = True
    return torch.from_numpy(np.packbits(truth))


def _find_type(size: int) -> np.dtype[Any]:
    """Return the smallest unsigned integer type that holds every position below `size`."""
    return np.min_scalar_type(max(0, size - 1))
