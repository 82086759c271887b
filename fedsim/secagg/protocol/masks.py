"""Masks: 32-bit words of a ChaCha20 key stream, added and subtracted modulo 2^32."""

from collections.abc import Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

Words = NDArray[np.uint32]

CHUNK_WORDS = 1 << 16
"""Number of words generated at once, small enough for the processor's cache."""


def add_mask(words: Words, seed: bytes) -> None:
    """Add the mask of a 32-byte seed to `words` (N,), modulo 2^32. Never use a seed twice: that reveals the difference."""
    for part, mask in _iterate_stream(words, seed):
        part += mask


def subtract_mask(words: Words, seed: bytes) -> None:
    """Subtract the mask generated from a 32-byte seed from `words` (N,), in place and modulo 2^32."""
    for part, mask in _iterate_stream(words, seed):
        part -= mask


def _iterate_stream(words: Words, seed: bytes) -> Iterator[tuple[Words, Words]]:
    """Yield pairs: the next view of at most `CHUNK_WORDS` of `words`, and the same number of words of the key stream of `seed`.

    The key words are valid only until the next pair, since their memory is used again.
    """
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    zeros, keystream = bytes(4 * CHUNK_WORDS), bytearray(4 * CHUNK_WORDS)
    for start in range(0, len(words), CHUNK_WORDS):
        part = words[start : start + CHUNK_WORDS]
        stream.update_into(memoryview(zeros)[: 4 * len(part)], keystream)
        yield part, np.frombuffer(keystream, dtype="<u4", count=len(part))
