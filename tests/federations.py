"""Small federations that tests attack, audit and score, and replays of attacks on them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attacker.attacks import AttackSpec
from attacker.replay.replay import Replay
from fedsim.config.experiment import validate
from fedsim.engine import engines
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording


def federate(
    out: Path, *, clients: int | Mapping[str, Any] = 2, batch_size: int = 1, device: str = "cpu", **settings: Any
) -> Path:
    """Run an experiment in this process and return its folder, `out`: one round and one local step of a small MLP on digits.

    clients:  their number, or the table `clients` of the experiment.
    settings: other top-level keys of the experiment, such as `training`, with their values.
    """
    experiment = {
        "rounds": 1,
        "model": {"name": "mlp", "hidden": [8]},
        "data": "digits",
        "clients": {"count": clients} if isinstance(clients, int) else clients,
        "training": {"learning_rate": 0.1, "batch_size": batch_size, "steps": 1},
        **settings,
    }
    run = FederationRun(experiment=validate(experiment, source="test"), out=out, client_seed=1, device=device)
    engines.run(run, engine="local")
    return out


def make_replay(run: Path, spec: AttackSpec, **settings: Any) -> Replay:
    """Return a replay of an attack on a run. settings: of `Replay`, without which results go to the run's reconstructions."""
    return Replay(**{"recording": Recording(run / "recording"), "spec": spec, "out": run / "reconstructions", **settings})
