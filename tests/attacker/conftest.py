"""Fixtures that make observations, what a server receives from one client that trains on known examples; and large data."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from observations import observe_rounds
from torch import Tensor

from attacker.attacks import Case
from fedsim.recording import DataSpec, ModelSpec, Observation

Observe = Callable[..., Observation]
signal.signal(signal.SIGINT, signal.default_int_handler)  # background shells ignore SIGINT


@pytest.fixture
def observe() -> Observe:
    """Function that returns the observation of one client that takes one step on each of the given batches (x, y).

    Further arguments are those of `observe_rounds`.
    """

    def make(*batches: tuple[Tensor, Tensor], **settings: Any) -> Observation:
        return observe_rounds([batches], noise_seed=98, **settings).observations[0]

    return make


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Folder of a copy of the finished federation of a test's module."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def image_case(observe: Observe) -> Callable[..., tuple[Case, Tensor, Tensor]]:
    """Function that returns an attack's input (case) for one smooth 8x8 grey image on a small LeNet, the image and its label."""

    def make(index: int = 0, **settings: object) -> tuple[Case, Tensor, Tensor]:
        data = DataSpec(shape=(1, 8, 8), num_classes=4)
        grid = torch.linspace(0, 1, 8)
        x = (0.5 + 0.4 * torch.sin(3 * grid[:, None] + index) * torch.cos(2 * grid[None] - index))[None, None]
        y = torch.tensor([index % 4])
        observation = observe((x, y), model=ModelSpec(name="lenet_dlg"), data=data, client=f"c{index}", **settings)
        return Case((observation,)), x, y

    return make
