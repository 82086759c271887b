"""Encoding of the entries of a tensor as a table of the distinct values and an index per entry."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedsim.recording.packing import palette
from fedsim.recording.packing.bits import Bits, bits_of, pack, packed_bytes, tensor_of, unpack, width_of
from fedsim.recording.packing.parts import TENSOR_OVERHEAD_BYTES, TensorLike, check_vector

VALUE_PARTS = ({"palette"}, {"palette", "codes"})


def tabled(bits: Bits, dtype: torch.dtype, most: int | None = None) -> dict[str, Tensor] | None:
    """Encode the bit patterns (N,) of entries of type `dtype` as a table; None if it has over `most` values or saves nothing."""
    found = palette.find(bits, most)
    if found is None:
        return None
    width = width_of(len(found.values))
    parts = {"palette": tensor_of(found.values, dtype, (-1,))}
    if width:
        parts["codes"] = pack(found.codes, width)
    return parts if cost(parts) < bits.nbytes + TENSOR_OVERHEAD_BYTES else None


def looked_up(parts: Mapping[str, Tensor], count: int) -> Bits:
    """Decode `count` entries that `tabled` encoded. Raises ValueError for an index beyond the table."""
    table = bits_of(parts["palette"])
    if "codes" not in parts:
        return table.repeat(count)
    codes = unpack(parts["codes"], width_of(len(table)), count)
    if count and codes.max() >= len(table):
        raise ValueError(f"has code {codes.max()} in a palette of {len(table)} values")
    found: Bits = table[codes]
    return found


def check(parts: Mapping[str, TensorLike], *, most: int, least_count: int, most_count: int) -> None:
    """Raise ValueError if `parts` cannot be a table of at most `most` values with indices of the given range of entries."""
    length = check_vector("palette", parts["palette"], None, least=1, most=most)
    width = width_of(length)
    if bool(width) != ("codes" in parts):
        raise ValueError(f"has a palette of {length} values {'without' if width else 'with'} codes")
    if width:
        least, most = packed_bytes(width, least_count), packed_bytes(width, most_count)
        check_vector("codes", parts["codes"], torch.uint8, least=least, most=most)


def cost(parts: Mapping[str, Tensor]) -> int:
    """Return the approximate number of bytes that `parts` take in a message."""
    return sum(TENSOR_OVERHEAD_BYTES + tensor.nbytes for tensor in parts.values())
