"""Generators of random numbers and of images for tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@contextmanager
def seed_default(seed: int) -> Iterator[None]:
    """Seed PyTorch's default generator within a `with` block, and restore its state at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def draw_smooth_images(count: int, side: int = 16) -> tuple[Tensor, Tensor]:
    """Return colour images of a few sine waves, and labels of ten classes."""
    rng, grid = seeded(11), torch.linspace(0, 1, side)
    phases = torch.rand(count, 3, 4, generator=rng)
    waves = torch.sin(6 * grid[:, None] * phases[..., 0, None, None] + 6 * phases[..., 1, None, None])
    x = 0.5 + 0.25 * waves + 0.2 * torch.cos(7 * grid * phases[..., 2, None, None] + 6 * phases[..., 3, None, None])
    return x.clamp(0, 1), torch.arange(count) % 10
