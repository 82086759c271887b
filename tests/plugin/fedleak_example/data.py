"""A data set, and a way to split it among clients."""

import numpy as np
from numpy.typing import NDArray

from fedsim.data import Dataset, Examples
from fedsim.recording import DataSpec


def discs(count: int = 40, size: int = 8, seed: int = 0) -> Dataset:
    """Make images of grey discs on a noisy background; the label says whether the disc is brighter than the background."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"))
    values, labels = [], []
    for number in range(count):
        centre, radius = rng.uniform(2, size - 2, size=(2, 1, 1)), rng.uniform(1.5, size / 3)
        inside = np.sqrt(np.square(grid - centre).sum(axis=0)) < radius
        bright = number % 2
        ground = rng.uniform(0.3, 0.7, size=(size, size))
        values.append(np.where(inside, 0.95 if bright else 0.05, ground)[None].astype(np.float32))
        labels.append(bright)
    examples = Examples(values=np.stack(values), labels=np.array(labels))
    held_out = np.arange(count) >= count * 3 // 4
    return Dataset(
        name="discs",
        spec=DataSpec(shape=(1, size, size), num_classes=2),
        class_names=("dark", "bright"),
        train=examples.select(~held_out),
        test=examples.select(held_out),
    )


def in_turn(examples: Examples, clients: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Deal the examples to the clients in turn, in their order."""
    return [np.arange(client, len(examples), clients) for client in range(clients)]
