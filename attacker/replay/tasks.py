"""Tasks of a replay: groups of cases that are attacked at once. Jobs and tasks are plain data, to be sent to other processes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from attacker.attacks import AttackSpec
from attacker.replay.checkpoints import Origin

RoundAndClient = tuple[int, str]
"""Round and client of a row."""


@dataclass(frozen=True, kw_only=True)
class ReplayJob:
    """The settings that all tasks of a replay share.

    recording, folder: paths of the recording and of the attack's reconstructions.
    attack, arguments: registered name and arguments of the attack. null: whether to run its null.
    threads: number of PyTorch threads; None leaves it as it is. device, model: as in `Replay`.
    every:   seconds between two checkpoints.
    """

    recording: str
    folder: str
    attack: str
    arguments: Mapping[str, Any]
    null: bool
    seed: int
    device: str
    threads: int | None = None
    model: str | None = None
    every: float = 60.0

    @property
    def spec(self) -> AttackSpec:
        return AttackSpec(name=self.attack, arguments=self.arguments, null=self.null)

    @property
    def origin(self) -> Origin:
        return Origin(attack=str(self.spec), seed=self.seed, device=torch.device(self.device).type)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ReplayJob":
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class TaskCase:
    """One case of a task as plain data.

    key:    unique name of the case. rows: round and client of its observations, in the order of rounds.
    labels, logits: true labels, and logits of the true examples, from oracles; None if the oracle is not used.
    """

    key: str
    rows: tuple[RoundAndClient, ...]
    labels: tuple[int, ...] | None = None
    logits: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """Cases that are attacked at once. They agree in `PlannedCase.sizes`: the examples of each observation, in order."""

    members: tuple[TaskCase, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(member.key for member in self.members)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        members = json.loads(text)["members"]
        return cls(members=tuple(TaskCase(**{name: _to_tuple(value) for name, value in member.items()}) for member in members))


def _to_tuple(value: Any) -> Any:
    """Return a value of JSON with tuples in place of its lists."""
    return tuple(map(_to_tuple, value)) if isinstance(value, list) else value


@dataclass
class TaskOutcome:
    """The outcome of a task.

    done: dict from the key of each case that the task reconstructed, also if interrupted, to the method that found the result.
    failed: dict from the key of each failed case to the reason.
    interrupted: whether Ctrl-C stopped the task early. notes: remarks, one sentence each.
    """

    done: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
