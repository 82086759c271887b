"""Tests that a single masked vector looks like uniform random words, and that the statistical tests detect weaker masks."""

import numpy as np
import pytest
from numpy.typing import NDArray
from protocol_round import Round, agreed
from scipy import stats

from fedsim.secagg.protocol.masks import CHUNK_WORDS, Words, add_mask, subtract_mask

SIZE = 200_000
SANE = 1e-4
"""Limit for p-values. With some twenty fixed draws, one is below it for one in five hundred choices of seeds."""

Seen = dict[int, Words]


def draw_words() -> Words:
    update = np.random.default_rng(7).normal(0, 1e-3, SIZE)
    words: Words = agreed(3).quantiser.encode({"w": update.astype(np.float32)}, {"w": (SIZE,)}, 4)
    return words


@pytest.fixture(scope="module")
def masked() -> Seen:
    played = Round(agreed(3), {i: draw_words() for i in (1, 2, 3)})  # three clients with the very same update
    played.run()
    return played.masked


def p_values(words: Words) -> dict[str, float]:
    """Return p-values of the hypothesis that words are uniform and independent.

    Chi-square tests of each byte, of bits, and of the low four bits of adjacent words; tests of the distribution and of the
    correlation of adjacent words.
    """
    as_bytes = words.view(np.uint8).reshape(-1, 4)
    found = {f"byte {i}": _chi_square(np.bincount(as_bytes[:, i], minlength=256)) for i in range(4)}
    ones = np.unpackbits(words.view(np.uint8)).reshape(-1, 32).sum(axis=0)
    found["bits"] = float(stats.chi2.sf((4 * (ones - len(words) / 2) ** 2 / len(words)).sum(), 32))
    pairs = (words[:-1] & 15) * 16 + (words[1:] & 15)
    found["neighbours"] = _chi_square(np.bincount(pairs[::2], minlength=256))
    found["words"] = float(stats.kstest(words / 2**32, "uniform").pvalue)
    runs = np.abs(np.corrcoef(words[:-1] / 2**32, words[1:] / 2**32)[0, 1]) * np.sqrt(len(words))
    found["order"] = float(2 * stats.norm.sf(runs))
    return found


def _chi_square(counts: NDArray[np.int64]) -> float:
    return float(stats.chisquare(counts).pvalue)


@pytest.mark.parametrize("client", [1, 2, 3])
def test_a_masked_vector_looks_like_uniform_words(client: int, masked: Seen) -> None:
    found = p_values(masked[client])
    assert min(found.values()) > SANE, found


def test_unmasked_and_biased_words_are_detected() -> None:
    """An unmasked update is detected, except in its lowest byte, and so are random words of which one bit is slightly biased."""
    plain = p_values(draw_words())
    assert max(plain[name] for name in ("byte 1", "byte 2", "byte 3", "words")) < 1e-9, plain
    words = np.random.default_rng(0).integers(0, 2**32, SIZE, dtype=np.uint32)
    assert min(p_values(words).values()) > SANE
    biased = words.copy()
    biased[: SIZE // 50] |= 1
    assert min(p_values(biased).values()) < SANE


def test_weaker_masks_are_detected() -> None:
    """Masks of 31 bits and masks that repeat after 1000 words are detected."""
    words = draw_words()
    rng = np.random.default_rng(1)
    assert min(p_values(words + rng.integers(0, 2**31, len(words), dtype=np.uint32)).values()) < SANE
    repeated = np.resize(rng.integers(0, 2**32, 1000, dtype=np.uint32), len(words))
    assert min(p_values(words + repeated).values()) < SANE


def test_masked_vectors_of_the_same_update_are_independent(masked: Seen) -> None:
    for a, b in ((1, 2), (1, 3), (2, 3)):
        assert np.mean(masked[a] == masked[b]) < 1e-4
        together = np.corrcoef(masked[a] / 2**32, masked[b] / 2**32)[0, 1]
        assert abs(together) * np.sqrt(SIZE) < 4
        assert min(p_values(masked[a] - masked[b]).values()) > SANE  # a common mask would cancel in the difference


def test_the_sum_of_all_masked_vectors_is_random(masked: Seen) -> None:
    """Each client adds a mask of its own to the pairwise ones, so that even the sum of all vectors is random."""
    assert min(p_values(masked[1] + masked[2] + masked[3]).values()) > SANE


@pytest.mark.parametrize("size", [0, 1, CHUNK_WORDS, CHUNK_WORDS + 3])
def test_subtracting_a_mask_undoes_adding_it(size: int) -> None:
    words = np.arange(size, dtype=np.uint32)
    masked = words.copy()
    add_mask(masked, bytes(32))
    assert size == 0 or not np.array_equal(masked, words)
    subtract_mask(masked, bytes(32))
    assert np.array_equal(masked, words)


def test_the_key_stream_is_chacha20() -> None:
    """The first block for a key, counter and nonce of zeros, RFC 8439, appendix A.1, test vector 1; and no block comes twice."""
    words = np.zeros(3 * CHUNK_WORDS, np.uint32)
    add_mask(words, bytes(32))
    assert len(np.unique(words.reshape(-1, 16), axis=0)) == len(words) // 16
    assert words.astype("<u4").tobytes().hex().startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")


def test_one_bit_of_a_seed_changes_the_whole_mask() -> None:
    one, two = np.zeros(1000, np.uint32), np.zeros(1000, np.uint32)
    add_mask(one, bytes(32))
    for place in range(0, 256, 37):  # bits in the whole seed, since it must not be folded
        seed = bytearray(32)
        seed[place // 8] = 1 << place % 8
        two[:] = 0
        add_mask(two, bytes(seed))
        assert np.mean(one == two) < 0.01
