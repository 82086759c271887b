"""Codecs `bits` and `levels`: each tensor as a palette, a table of its distinct values, and the index in it of each entry.

A table of `bits` has at most 2 values; `levels` has tables of any size that saves space. The values are in the table, so that
the codecs work for any quantiser. Tensors that such a table does not make smaller stay unchanged.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from defenses.base import Tensors
from fedsim.recording.packing.bits import Bits, compute_width, count_packed_bytes, pack, to_bits, to_tensor, unpack
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

SAMPLE_SIZE = 8192
"""Number of entries that are sampled to estimate how many values differ."""
MAX_DISTINCT_SHARE = 0.95
"""Share of distinct values in a sample above which a table would not save space.

For a tensor of 2**16 equally frequent values, a sample has a share of 0.94.
"""
MAX_DISTINCT_IN_SAMPLE = 1024
"""Number of distinct values in a sample below which the sample most likely holds nearly all values of the tensor."""
MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)


class Palette(NamedTuple):
    """The distinct values of a tensor and their use.

    values: the distinct bit patterns, ascending as unsigned integers. codes: (N,) index in `values` of each entry.
    """

    values: Bits
    codes: NDArray[Any]


def find_palette(bits: Bits, max_values: int | None = None) -> Palette | None:
    """Return the palette of `bits` (N,), or None if more than `max_values` values are distinct, or most likely nearly all.

    Whether nearly all are distinct is judged by a sample, and only for large N. None is also returned for N = 0. Entries are
    looked up by a hash and then compared, which is faster than sorting them all.
    """
    max_values = len(bits) if max_values is None else max_values
    sample = bits[:: max(1, len(bits) // SAMPLE_SIZE)]
    values = _find_distinct(sample)
    if len(sample) < len(bits) and len(values) > MAX_DISTINCT_IN_SAMPLE:
        if max_values <= MAX_DISTINCT_IN_SAMPLE or len(values) > MAX_DISTINCT_SHARE * len(sample):
            return None
        values = _find_distinct(bits)
    while 0 < len(values) <= max_values:
        codes = _look_up_by_hash(bits, values)
        wrong = np.flatnonzero(values[codes] != bits)
        rest = bits[wrong]
        codes[wrong] = np.minimum(np.searchsorted(values, rest), len(values) - 1)
        unknown = rest[values[codes[wrong]] != rest]
        if not len(unknown):
            return Palette(values, codes)
        values = _find_distinct(np.concatenate([values, unknown]))
    return None


def _find_distinct(bits: Bits) -> Bits:
    """Return the distinct values, ascending. It is faster than `np.unique` if most values differ."""
    ordered = np.sort(bits)
    distinct: Bits = ordered[np.concatenate([np.ones(min(1, len(ordered)), bool), ordered[1:] != ordered[:-1]])]
    return distinct


def _look_up_by_hash(bits: Bits, values: Bits) -> NDArray[Any]:
    """Return the presumed index in `values` of each entry, by multiplicative hashing (Knuth, vol. 3, 6.4).

    The index is wrong for entries that are not in `values`, and for some entries whose hash equals the hash of another value.
    """
    kind, width = bits.dtype.type, 8 * bits.itemsize
    places = np.zeros(1 << min(width, compute_width(len(values)) + 6), np.min_scalar_type(len(values) - 1))
    shift = kind(width - compute_width(len(places)))
    factors = [kind(multiplier % (1 << width)) for multiplier in MULTIPLIERS]
    factor = max(factors, key=lambda factor: len(np.unique((values * factor) >> shift)))
    places[(values * factor) >> shift] = np.arange(len(values), dtype=places.dtype)
    codes: NDArray[Any] = places[(bits * factor) >> shift]
    return codes


VALUE_PARTS = ({"palette"}, {"palette", "codes"})


def encode_table(bits: Bits, dtype: torch.dtype, maximum: int | None = None) -> dict[str, Tensor] | None:
    """Return {"palette": distinct values, "codes": packed indices into it} for the bit patterns (N,) of entries of type `dtype`.

    If all entries are equal, "codes" is left out. Returns None if there are no entries or over `maximum` distinct values, or the
    encoding saves nothing.
    """
    table = find_palette(bits, maximum)
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


def check_table(parts: Mapping[str, TensorLike], *, maximum: int, min_count: int, max_count: int) -> None:
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


def encode(update: Tensors, max_values: int | None = None) -> dict[str, Tensor]:
    """Return a dict of the tensors to send: for each parameter NAME, a table `NAME/palette` and indices `NAME/codes` into it.

    `NAME/codes` is left out if all values are equal. A tensor with over `max_values` distinct values, or which would not become
    smaller, is sent unchanged as `NAME/dense`.
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in update.items():
        packed |= join_parts(name, encode_table(to_bits(tensor), tensor.dtype, max_values) or {"dense": tensor})
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
                update[name] = to_tensor(decode_table(parts, prod(shape)), parts["palette"].dtype, shape)
    return update


def check_fit(described: Mapping[str, TensorLike], weights: Mapping[str, TensorLike], max_values: int | None = None) -> None:
    """Raise ValueError if names, types or shapes of the parts cannot belong to an update of these weights.

    max_values: largest number of values that a tensor's table may have; None for any number.
    """

    def check(parts: Mapping[str, TensorLike], size: int) -> bool:
        if parts.keys() not in VALUE_PARTS:
            return False
        check_table(parts, maximum=size if max_values is None else min(max_values, size), min_count=size, max_count=size)
        return True

    check_parts(described, weights, "levels" if max_values is None else "bits", check)
