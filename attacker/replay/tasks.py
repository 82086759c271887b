"""Tasks of a replay, groups of cases that are attacked at once, and their progress.

Jobs and tasks are plain data, to be sent to other processes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from attacker.attacks import AttackSpec, Progress
from attacker.replay.checkpoints import Origin

RoundAndClient = tuple[int, str]
"""Round and client of a row."""
Watch = Callable[[float, int, str], None]
"""Callback with (number of cases done, fractional for cases under way; number of all cases; a few words)."""


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


class Meter:
    """The progress of several tasks: the number of cases done, with fractions for tasks under way, is reported to `watch`.

    The share of a task never falls: an attack of several stages, such as closed forms and then a search, counts each from 0.
    """

    def __init__(self, tasks: Sequence[Task], watch: Watch | None) -> None:
        self._cases = [len(task.members) for task in tasks]
        self._shares = [0.0] * len(tasks)
        self._watch = watch

    def record_progress(self, number: int, share: float, message: str) -> None:
        """Record the share in [0, 1] that is done of a task, and report the total and a few words to `watch`."""
        self._shares[number] = max(self._shares[number], share)
        if self._watch is not None:
            done = sum(cases * share for cases, share in zip(self._cases, self._shares, strict=True))
            self._watch(done, sum(self._cases), message)

    def of_attack(self, number: int) -> Progress:
        """Return the progress callback of the task with index `number`, to be passed to the attack that works on this task."""
        return lambda done, total, message: self.record_progress(
            number, compute_share(done, total), format_progress(done, total, message)
        )


def compute_share(done: int, total: int) -> float:
    """Return the share done / total of a task's iterations, at most 0.99, since its files are not written yet."""
    return min(0.99, done / max(1, total))


def format_progress(done: int, total: int, message: str) -> str:
    """Return the progress of an attack as one line, such as "40 of 100, loss 0.1". done, total: as in `compute_share`."""
    return f"{done} of {total}, {message}"
