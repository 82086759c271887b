"""Clients that take several local steps per round, each on a batch of some of their examples."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from checkpoint_memory import DictMemory
from generators import seeded
from observations import observe_steps
from torch import Tensor

from attacker.attacks import Attack, Case
from attacker.reconstruction import Reconstruction
from attacker.scoring.metrics import mse
from fedsim.recording import DataSpec, ModelSpec, Observation

DATA = DataSpec(shape=(1, 8, 8), num_classes=4)


def observe_batches(x: Tensor, y: Tensor, orders: Sequence[Sequence[int]], rate: float = 1.0, **settings: object) -> Observation:
    """Return what the server sees of a client that takes a step on each of these batches, and uses each example once an epoch."""
    batches = [(x[list(order)], y[list(order)]) for order in orders]
    seen = observe_steps(*batches, model=ModelSpec(name="lenet_dlg"), data=DATA, learning_rate=rate, **settings)
    epochs = sum(map(len, orders)) // len(y)
    return replace(seen, training=replace(seen.training, steps=None, epochs=epochs), num_examples=len(y))


def draw_images(count: int) -> Tensor:
    """Return smooth grey images (count, 1, 8, 8), whose gradients of brightness have different directions."""
    down, across = torch.meshgrid(torch.linspace(0, 1, 8), torch.linspace(0, 1, 8), indexing="ij")
    images = [down, across, 1 - down, 1 - across, down * across, (down - across).abs()]
    return torch.stack(images[:count])[:, None]


def measure_error(found: Reconstruction, x: Tensor) -> float:
    """Return the mean squared error of the assignment of reconstructions to images that has the smallest."""
    return min(float(mse(found.x[list(order)], x).mean()) for order in permutations(range(len(x))))


def check_progress(told: Sequence[tuple[int, int, str]]) -> None:
    """Assert that reported progress never decreases, and that its total stays the same and is not exceeded."""
    done = [d for d, _, _ in told]
    assert done == sorted(done)
    assert len({total for _, total, _ in told}) == 1
    assert done[-1] <= told[0][1]


def check_resumption(attack: Attack, case: Case, part: str) -> None:
    """Assert that an attack killed while it saves a state under a key that begins with `part` resumes to bitwise equal images."""
    memory = DictMemory(part)
    with pytest.raises(SystemExit):
        attack([case], rng=seeded(), memory=memory)
    (resumed,) = attack([case], rng=seeded(), memory=replace(memory, until=""))
    (whole,) = attack([case], rng=seeded())
    assert torch.equal(resumed.x, whole.x)
    assert resumed.evaluations == whole.evaluations
