"""Tables of the distinct values of a tensor, for tensors that have few of them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedsim.recording.packing.bits import Bits, width_of

SAMPLE_SIZE = 8192
MAX_DISTINCT_SHARE = 0.95
"""Where more than this share of a sample differs, the table would be too long to pay off: with 2**16 values 0.94 do."""
MAX_DISTINCT_IN_SAMPLE = 1024
"""Where fewer differ in a sample, it most likely holds nearly all that differ."""
MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)


class Palette(NamedTuple):
    """values: distinct bit patterns, ascending. codes: (N,) index of each entry's value among them."""

    values: Bits
    codes: NDArray[Any]


def find(bits: Bits, most: int | None = None) -> Palette | None:
    """Return the palette of `bits` (N,); None where it has more than `most` values, or so many that it saves nothing.

    Values are collected from a sample and completed by comparing every entry with its table entry, which is faster than sorting.
    """
    most = len(bits) if most is None else most
    sample = bits[:: max(1, len(bits) // SAMPLE_SIZE)]
    values = _distinct(sample)
    if len(sample) < len(bits) and len(values) > MAX_DISTINCT_IN_SAMPLE:
        if most <= MAX_DISTINCT_IN_SAMPLE or len(values) > MAX_DISTINCT_SHARE * len(sample):
            return None
        values = _distinct(bits)
    while 0 < len(values) <= most:
        codes = _by_hash(bits, values)
        wrong = np.flatnonzero(values[codes] != bits)
        rest = bits[wrong]
        codes[wrong] = np.minimum(np.searchsorted(values, rest), len(values) - 1)
        unknown = rest[values[codes[wrong]] != rest]
        if not len(unknown):
            return Palette(values, codes)
        values = _distinct(np.concatenate([values, unknown]))
    return None


def _distinct(bits: Bits) -> Bits:
    """Return the distinct values, ascending, like `np.unique`, which takes ten times as long on many distinct values."""
    ordered = np.sort(bits)
    found: Bits = ordered[np.concatenate([np.ones(min(1, len(ordered)), bool), ordered[1:] != ordered[:-1]])]
    return found


def _by_hash(bits: Bits, values: Bits) -> NDArray[Any]:
    """Return for nearly every entry its index in `values`, by multiplicative hashing (Knuth, vol.

    3, 6.4), for others any index.
    """
    kind, width = bits.dtype.type, 8 * bits.itemsize
    places = np.zeros(1 << min(width, width_of(len(values)) + 6), np.min_scalar_type(len(values) - 1))
    shift = kind(width - width_of(len(places)))
    factors = [kind(multiplier % (1 << width)) for multiplier in MULTIPLIERS]
    factor = max(factors, key=lambda factor: len(np.unique((values * factor) >> shift)))
    places[(values * factor) >> shift] = np.arange(len(values), dtype=places.dtype)
    found: NDArray[Any] = places[(bits * factor) >> shift]
    return found
