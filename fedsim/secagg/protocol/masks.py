"""Masks: 32-bit words out of a ChaCha20 key stream, added and subtracted modulo 2^32."""

from collections.abc import Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

Words = NDArray[np.uint32]

CHUNK = 1 << 16
"""Words that are made at once: they stay in the processor's cache."""


def add_mask(words: Words, seed: bytes) -> None:
    """Add to `words` (N,), in place, the mask of a 32-byte seed. No seed may serve for two vectors."""
    for part, mask in _stream(words, seed):
        part += mask


def subtract_mask(words: Words, seed: bytes) -> None:
    """The inverse of `add_mask`."""
    for part, mask in _stream(words, seed):
        part -= mask


def _stream(words: Words, seed: bytes) -> Iterator[tuple[Words, Words]]:
    """Views of `words`, one after the other, each with as much of the key stream."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    zeros, made = bytes(4 * CHUNK), bytearray(4 * CHUNK)
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK]
        stream.update_into(memoryview(zeros)[: 4 * len(part)], made)
        yield part, np.frombuffer(made, dtype="<u4", count=len(part))
