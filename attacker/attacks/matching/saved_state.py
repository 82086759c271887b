"""What a search leaves in a memory, so that one that was killed goes on where it was."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor

from attacker.attacks.base import Look, Memory

State = dict[str, Tensor]
SIGHTS = 1.0
"""Seconds between two looks at a search."""


@dataclass
class Best:
    """The best restart of one case so far, by the attack's own loss. given: it began where the search was told to."""

    loss: float = float("inf")
    z: Tensor | None = None
    labels: Tensor | None = None
    history: Tensor = field(default_factory=lambda: torch.empty(0))
    given: bool = False
    iterations: int = 0
    evaluations: int = 0
    restarts: int = 0


def now_and_then(
    memory: Memory, key: str, show: Callable[[Look, Mapping[str, Tensor]], None]
) -> Callable[[Callable[[], Mapping[str, Tensor]]], None]:
    """Keeps a state, made only then, where `memory.every` seconds have passed since it was last kept; shows it to who looks."""
    kept = seen = monotonic()

    def keep(state: Callable[[], Mapping[str, Tensor]]) -> None:
        nonlocal kept, seen
        if monotonic() - kept >= memory.every:
            memory.keep(key, state())
            kept = monotonic()
        if memory.look is not None and monotonic() - seen >= SIGHTS:
            show(memory.look, state())
            seen = monotonic()

    return keep


def to_device(state: Mapping[str, Tensor] | None, device: str) -> State | None:
    """A recalled state where the search computes."""
    return None if state is None else {name: t.to(device) for name, t in state.items()}


def bests_as_tensors(bests: Sequence[Best], restarts: int) -> State:
    """All bests after so many restarts."""
    state: State = {"restarts": torch.tensor(restarts)}
    for i, best in enumerate(bests):
        assert best.z is not None
        assert best.labels is not None
        state |= {f"{i}.z": best.z, f"{i}.labels": best.labels, f"{i}.history": best.history}
        state[f"{i}.loss"] = torch.tensor(best.loss, dtype=torch.float64)
        state[f"{i}.counts"] = torch.tensor([best.iterations, best.evaluations, best.restarts])
        state[f"{i}.given"] = torch.tensor(best.given)
    return state


def bests_of(state: Mapping[str, Tensor], device: str) -> tuple[list[Best], int]:
    """What `bests_as_tensors` made tensors of."""
    count = sum(name.endswith(".z") for name in state)
    bests = [
        Best(
            float(state[f"{i}.loss"]),
            state[f"{i}.z"].to(device),
            state[f"{i}.labels"].to(device),
            state[f"{i}.history"].to(device),
            bool(state[f"{i}.given"]),
            *map(int, state[f"{i}.counts"]),
        )
        for i in range(count)
    ]
    return bests, int(state["restarts"])


@dataclass(frozen=True)
class _Within:
    """A part of a memory."""

    whole: Memory
    prefix: str

    @property
    def every(self) -> float:
        return self.whole.every

    @property
    def look(self) -> Look | None:
        return self.whole.look

    def recall(self, key: str) -> dict[str, Tensor] | None:
        return self.whole.recall(self.prefix + key)

    def keep(self, key: str, state: Mapping[str, Tensor], *, drop: str = "") -> None:
        self.whole.keep(self.prefix + key, state, drop=self.prefix + drop if drop else "")


def within(memory: Memory | None, prefix: str) -> Memory | None:
    """The part of a memory whose keys begin with `prefix`: one search of several that an attack makes."""
    return None if memory is None else _Within(memory, prefix)
