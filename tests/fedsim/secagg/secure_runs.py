"""Functions with which tests read and check a federation with secure aggregation."""

import json
from typing import Any

import torch
from tiny_experiments import make_tiny
from torch import Tensor

from fedsim.config.experiment import Experiment
from fedsim.engine.run import FederationRun
from fedsim.recording import Observation, Recording
from fedsim.server.checkpoint import ServerCheckpoint

SECURE: dict[str, Any] = {"clients": {"count": 5}, "secure_aggregation": True}
EPOCH = {
    "partition": {"name": "dirichlet", "alpha": 1.0},
    "training": {"learning_rate": 0.1, "batch_size": 64, "epochs": 1, "momentum": 0.5},
}
"""Settings that give clients different numbers of examples."""


def make_secure(**changes: Any) -> Experiment:
    """Return an experiment of five clients with secure aggregation, with the given top-level keys replaced."""
    return make_tiny(**{**SECURE, **changes})


def recorded(run: FederationRun) -> Recording:
    return Recording(run.out / "recording")


def weights_after(run: FederationRun) -> dict[str, Tensor]:
    state = ServerCheckpoint.read(run.out / "state")
    return dict(state.arrays)


def mean_of(updates: list[Observation]) -> dict[str, Tensor]:
    """Compute the mean of updates, weighted by examples, in double precision."""
    total = sum(o.num_examples or 0 for o in updates)
    return {
        name: torch.stack([(o.num_examples or 0) / total * o.update[name].double() for o in updates]).sum(dim=0)
        for name in updates[0].update
    }


def half_a_step(run: FederationRun) -> float:
    agreement = run.experiment.settle_agreement()
    return 0.5 * agreement.clip / agreement.target_range


def assert_is_mean(run: FederationRun, observation: Observation, updates: list[Observation]) -> None:
    """Check that an observed mean is that of the updates, up to quantisation and rounding to float32."""
    for name, expected in mean_of(updates).items():
        error = (observation.update[name].double() - expected).abs()
        assert bool((error <= half_a_step(run) + 1e-7 * expected.abs()).all()), name


def of_partitions(run: FederationRun) -> list[str]:
    """Return the clients' pseudonyms in the order of their partitions."""
    folders = sorted((run.out / "clients").glob("partition-*"))
    return [json.loads((folder / "identity.json").read_text())["pseudonym"] for folder in folders]
