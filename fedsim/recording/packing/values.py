"""Encoding of the entries of a tensor as a table of the distinct values and an index per entry."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedsim.recording.packing import palette
from fedsim.recording.packing.bits import Bits, compute_width, count_packed_bytes, pack, to_bits, to_tensor, unpack
from fedsim.recording.packing.parts import PACKED_ADVICE, TENSOR_OVERHEAD_BYTES, TensorLike, check_vector

VALUE_PARTS = ({"palette"}, {"palette", "codes"})


def encode_table(bits: Bits, dtype: torch.dtype, maximum: int | None = None) -> dict[str, Tensor] | None:
    """Return {"palette": distinct values, "codes": packed indices into it} for the bit patterns (N,) of entries of type `dtype`.

    If all entries are equal, "codes" is left out. Returns None if there are no entries or over `maximum` distinct values, or the
    encoding saves nothing.
    """
    table = palette.find_palette(bits, maximum)
    if table is None:
        return None
    width = compute_width(len(table.values))
    parts = {"palette": to_tensor(table.values, dtype, (-1,))}
    if width:
        parts["codes"] = pack(table.codes, width)
    return parts if count_bytes(parts) < bits.nbytes + TENSOR_OVERHEAD_BYTES else None


def decode_table(parts: Mapping[str, Tensor], count: int) -> Bits:
    """Return the bit patterns (count,) that `encode_table` encoded.

    Raises ValueError if "codes" has the wrong length for `count` entries, or an index lies beyond the table.
    """
    table = to_bits(parts["palette"])
    if "codes" not in parts:
        return table.repeat(count)
    codes = unpack(parts["codes"], compute_width(len(table)), count)
    if count and codes.max() >= len(table):
        raise ValueError(
            f"is packed with index {codes.max()} into a table of {len(table)} values, counted from 0; {PACKED_ADVICE}"
        )
    bits: Bits = table[codes]
    return bits


def check(parts: Mapping[str, TensorLike], *, maximum: int, min_count: int, max_count: int) -> None:
    """Raise ValueError if types or lengths of `parts` cannot be those of a table of values and packed indices into it.

    maximum: largest number of values in the table. min_count, max_count: range, both ends included, of the number of entries
    that the indices are for.
    """
    length = check_vector("palette", parts["palette"], None, minimum=1, maximum=maximum)
    width = compute_width(length)
    if width and "codes" not in parts:
        raise ValueError(
            f"is packed as a table of {length} values ('palette') without an index per entry ('codes'); {PACKED_ADVICE}"
        )
    if not width and "codes" in parts:
        raise ValueError(
            "is packed as a table of a single value ('palette') with an index per entry ('codes'), which only larger tables "
            f"need; {PACKED_ADVICE}"
        )
    if width:
        minimum, maximum = count_packed_bytes(width, min_count), count_packed_bytes(width, max_count)
        check_vector("codes", parts["codes"], torch.uint8, minimum=minimum, maximum=maximum)


def count_bytes(parts: Mapping[str, Tensor]) -> int:
    """Return the approximate number of bytes that `parts` take in a message."""
    return sum(TENSOR_OVERHEAD_BYTES + tensor.nbytes for tensor in parts.values())
