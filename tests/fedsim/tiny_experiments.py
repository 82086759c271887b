"""A small experiment: three clients with digits."""

from collections.abc import Callable
from typing import Any

from fedsim.config.experiment import Experiment, validate
from fedsim.engine.run import FederationRun

Federate = Callable[..., FederationRun]
"""Type of the fixture `federate`, which runs an experiment."""

TINY: dict[str, Any] = {
    "seed": 3,
    "rounds": 2,
    "model": {"name": "mlp", "hidden": [4]},
    "data": "digits",
    "clients": {"count": 3},
    "training": {"learning_rate": 0.5, "batch_size": 4, "steps": 1},
}


def make_tiny(**changes: Any) -> Experiment:
    """Return the experiment `TINY` with the given top-level keys replaced."""
    return validate({**TINY, **changes}, source="tiny.toml")
