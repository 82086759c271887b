"""A federation for a separate process that is killed; tests start it by this module's name."""

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tiny_experiments import TINY
from torch import nn

from defenses import DEFENSES, Defense
from defenses.channel import transparent
from defenses.spec import Kind
from fedsim.config.experiment import admit_code, validate
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.truth import TruthWriter

EXPERIMENT: dict[str, Any] = {
    **TINY,
    "rounds": 6,
    "training": {**TINY["training"], "steps": 2, "momentum": 0.5},
    "defense": "gaussian(0.001) | total()",
}


def total() -> Defense:
    """Return a toy defense with a state: it sends the sum of all updates so far."""

    def apply(update: Any, state: Any, rng: Any) -> Any:
        added = {name: state[name] + t for name, t in update.items()}
        return added, added

    return Defense(init=lambda template: {name: torch.zeros_like(t) for name, t in template.items()}, apply=apply)


class WithChance(nn.Sequential):
    """A network with batch norm and dropout, whose statistics and random draws must be the same after resuming."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 10))


TOTAL = Kind(total, lambda: transparent)


def federate(out: Path, changes: dict[str, Any], *, crash_at: int | None = None, started: Connection | None = None) -> None:
    """Begin or resume the federation in `out`.

    crash_at: exit at once before this write, where each fsync and each renaming counts as one. started: gets the process id
    when all modules are imported.
    """
    DEFENSES._builtin["total"] = TOTAL
    torch.set_num_threads(1)
    admit_code({**EXPERIMENT, **changes})
    run = FederationRun(
        experiment=validate({**EXPERIMENT, **changes}, source="test"), out=out, device="cpu", client_seed=5, resume=True
    )
    if crash_at is not None:
        _crash(crash_at)
    TruthWriter.write = _failing_in_round_3(TruthWriter.write)
    if started is not None:
        started.send(os.getpid())
    if not run.is_done():
        engine.run(run, engine="local")


def _failing_in_round_3(write: Any) -> Any:
    """Wrap a write of truth so that it fails in round 3 for clients whose pseudonym begins with a digit below 8."""

    def wrapped(self: TruthWriter, round: int, *rest: Any) -> None:
        if round == 3 and self._path.stem < "8":
            raise RuntimeError("sensor unplugged")
        write(self, round, *rest)

    return wrapped


def _crash(at: int) -> None:
    done = 0

    def counted(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done == at:
                os._exit(9)
            return function(*args, **kwargs)

        return wrapped

    os.replace, os.fsync = counted(os.replace), counted(os.fsync)
