"""Fixtures for small federations and recordings, and tensors with awkward values."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from awkward_tensors import AWKWARD
from tiny_experiments import make_tiny
from torch import Tensor

from defenses import DefenseSpec
from fedsim.recording import DataSpec, Manifest, ModelSpec, Training


@pytest.fixture(autouse=True)
def _restored_global_state() -> Iterator[None]:
    """Global random state as before the test, as Flower uses the global generator."""
    state = random.getstate()
    yield
    random.setstate(state)


@pytest.fixture
def federate(tmp_path: Path) -> Callable[..., Any]:
    """A function that runs the experiment of `make_tiny` in this process and returns the `FederationRun`."""

    def go(name: str = "run", *, client_seed: int | None = 5, on_round: Any = None, resume: bool = False, **changes: Any) -> Any:
        from fedsim.engine import engines as engine
        from fedsim.engine.run import FederationRun

        run = FederationRun(
            experiment=make_tiny(**changes), out=tmp_path / name, device="cpu", client_seed=client_seed, resume=resume
        )
        engine.run(run, engine="local", on_round=on_round)
        return run

    return go


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        name="a run",
        model=ModelSpec(name="mlp", arguments={"hidden": [3, 2]}),
        data=DataSpec(shape=(3, 2, 2), num_classes=4, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0)),
        training=Training(learning_rate=0.1, batch_size=2, steps=3, momentum=0.5),
        defense=DefenseSpec.parse("clip(4.5) | gaussian(0.1)"),
        created="2026-01-02T03:04:05Z",
        software={"torch": "2"},
    )


@pytest.fixture
def awkward() -> dict[str, Tensor]:
    return {name: t.clone() if name not in ("turned", "part") else t for name, t in AWKWARD.items()}
