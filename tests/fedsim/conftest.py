"""Fixtures for small federations and recordings, and tensors with awkward values."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from defenses import DefenseSpec
from fedsim.recording import DataSpec, Manifest, ModelSpec, Training

TINY: dict[str, Any] = {
    "seed": 3,
    "rounds": 2,
    "model": {"name": "mlp", "hidden": [4]},
    "data": "digits",
    "clients": {"count": 3},
    "training": {"learning_rate": 0.5, "batch_size": 4, "steps": 1},
}


@pytest.fixture(autouse=True)
def _restored_global_state() -> Iterator[None]:
    """Global random state as before the test, as Flower uses the global generator."""
    state = random.getstate()
    yield
    random.setstate(state)


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """A function that returns an experiment of three clients with digits, with the given top-level keys replaced."""
    from fedsim.config.experiment import validate

    return lambda **changes: validate({**TINY, **changes}, source="tiny.toml")


@pytest.fixture
def federate(tmp_path: Path, tiny: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs the experiment of `tiny` in this process and returns the `FederationRun`."""

    def go(name: str = "run", *, client_seed: int | None = 5, on_round: Any = None, resume: bool = False, **changes: Any) -> Any:
        from fedsim.engine import engines as engine
        from fedsim.engine.run import FederationRun

        run = FederationRun(experiment=tiny(**changes), out=tmp_path / name, device="cpu", client_seed=client_seed, resume=resume)
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


AWKWARD: dict[str, Tensor] = {
    "z.nan": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45]),
    "a.scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "double": torch.tensor([1 / 3], dtype=torch.float64),
    "half": torch.tensor([1 / 3], dtype=torch.float16),
    "whole": torch.tensor([-(2**62)], dtype=torch.int64),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "part": torch.arange(6.0)[2:4],
}
"""Tensors that lossless storage must keep bit for bit: special values, shapes, types and views."""


def are_identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Compare bit for bit, also NaN and the sign of zero; the order of names does not count."""

    def bits(t: Tensor) -> tuple[Any, ...]:
        return t.dtype, tuple(t.shape), t.contiguous().numpy().tobytes()

    return {name: bits(t) for name, t in a.items()} == {name: bits(t) for name, t in b.items()}


@pytest.fixture
def awkward() -> dict[str, Tensor]:
    return {name: t.clone() if name not in ("turned", "part") else t for name, t in AWKWARD.items()}


@pytest.fixture
def same_bits() -> Callable[..., bool]:
    return are_identical
