"""Palettes: a table of the distinct values of a tensor, and for each entry the index of its value in the table."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedsim.recording.packing.bits import Bits, compute_width

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
