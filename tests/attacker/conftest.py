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
from attacker.attacks.labels import observed
from attacker.attacks.labels.step_labels import InferredOrder
from attacker.attacks.matching import gradient_matching
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


@pytest.fixture(scope="session")
def inferred_orders() -> dict[bytes, tuple[InferredOrder | None, Tensor]]:
    """Orders of examples inferred so far, with the state of the random generator after it, by what they were inferred from."""
    return {}


@pytest.fixture
def orders_inferred_once(
    inferred_orders: dict[bytes, tuple[InferredOrder | None, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Infer the order of a client's examples, which takes seconds, only once for all tests with the same update."""
    infer = observed.infer_step_order

    def find(seen: Any, i: int, labels: Tensor, rng: torch.Generator, *, known: bool) -> InferredOrder | None:
        facts = [*(g[i] for g in seen.gradients.values()), labels, rng.get_state()]
        key = repr((seen.training, known)).encode() + b"".join(t.detach().cpu().numpy().tobytes() for t in facts)
        if key not in inferred_orders:
            inferred_orders[key] = infer(seen, i, labels, rng, known=known), rng.get_state()
        rng.set_state(inferred_orders[key][1])
        return inferred_orders[key][0]

    for module in (observed, gradient_matching):
        monkeypatch.setattr(module, "infer_step_order", find)


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
