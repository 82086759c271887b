"""Generators of random numbers for tests."""

from torch import Generator


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)
