"""Small federations with secure aggregation."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.secagg.masks import Words


@pytest.fixture
def some_words() -> Callable[[int], dict[int, Words]]:
    """For so many clients, 50 words each."""

    def make(clients: int) -> dict[int, Words]:
        rng = np.random.default_rng(0)
        return {i: rng.integers(0, 2**32, 50, dtype=np.uint32) for i in range(1, clients + 1)}

    return make


@pytest.fixture(autouse=True)
def _global_state_is_put_back() -> Iterator[None]:
    threads, state = torch.get_num_threads(), random.getstate()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    random.setstate(state)


TINY: dict[str, Any] = {
    "seed": 3,
    "rounds": 2,
    "model": {"name": "mlp", "hidden": [4]},
    "data": "digits",
    "clients": {"count": 5},
    "training": {"learning_rate": 0.5, "batch_size": 4, "steps": 1},
    "secure_aggregation": True,
}


@pytest.fixture
def experiment() -> Callable[..., Any]:
    """Of five clients with digits, some top-level keys replaced."""
    from fedsim.experiment import validate

    return lambda **changes: validate({**TINY, **changes}, source="tiny.toml")


@pytest.fixture
def federate(tmp_path: Path, experiment: Callable[..., Any]) -> Callable[..., Any]:
    """Run that experiment in this process; returns the `Run`."""

    def go(name: str = "run", *, client_seed: int | None = 5, resume: bool = False, **changes: Any) -> Any:
        from fedsim import engine
        from fedsim.app import Run

        run = Run(experiment=experiment(**changes), out=tmp_path / name, device="cpu", client_seed=client_seed, resume=resume)
        engine.run(run, engine="local")
        return run

    return go
