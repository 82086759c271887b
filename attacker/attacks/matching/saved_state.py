"""Checkpoints of a search, with which it resumes after the process was killed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor

from attacker.attacks.base import Look, Memory

SavedState = dict[str, Tensor]
DISPLAY_SECONDS = 1.0
"""Seconds between two updates of the live display of a search."""


@dataclass
class BestResult:
    """The best result for one case so far: the result with the lowest loss.

    loss: infinite before the first search. z: latent vector, None before the first search.
    labels: used in the search that found z. history: best loss of this search after each iteration. from_warm_start: whether this
    search began at a warm start. given_up: whether it was stopped as hopeless, see `Stop`. polished: number of gradient
    evaluations of the second search, which began at the result of this one (`Polish`).
    iterations, evaluations, restarts: numbers of iterations, gradient evaluations and searches, summed over all searches of the
    case.
    """

    loss: float = float("inf")
    z: Tensor | None = None
    labels: Tensor | None = None
    history: Tensor = field(default_factory=lambda: torch.empty(0))
    from_warm_start: bool = False
    iterations: int = 0
    evaluations: int = 0
    restarts: int = 0
    given_up: bool = False
    polished: int = 0

    def get_latent(self) -> tuple[Tensor, Tensor]:
        """Return the latent vector (D,) and the labels (V,) of a result that a search has found."""
        assert self.z is not None
        assert self.labels is not None
        return self.z, self.labels


def checkpoint_periodically(
    memory: Memory, key: str, show: Callable[[Look, Mapping[str, Tensor]], None]
) -> Callable[[Callable[[], Mapping[str, Tensor]]], None]:
    """Return a callback for `descend` that saves the search's state under `key` in `memory`, about every `memory.every` seconds.

    If `memory.look` is set, it also calls `show(memory.look, state)` about every DISPLAY_SECONDS, which updates the live display.
    The callback receives a function that returns the state, and calls it only if it needs the state.
    """
    kept = seen = monotonic()

    def keep(state: Callable[[], Mapping[str, Tensor]]) -> None:
        nonlocal kept, seen
        if monotonic() - kept >= memory.every:
            memory.keep(key, state())
            kept = monotonic()
        if memory.look is not None and monotonic() - seen >= DISPLAY_SECONDS:
            show(memory.look, state())
            seen = monotonic()

    return keep


def to_device(state: Mapping[str, Tensor] | None, device: str) -> SavedState | None:
    """Return a restored state with its tensors on `device`, or None if `state` is None."""
    return None if state is None else {name: t.to(device) for name, t in state.items()}


def pack_bests(bests: Sequence[BestResult], restarts: int) -> SavedState:
    """Return the best results of all cases as tensors by name, for a checkpoint. restarts: number of starts done."""
    state: SavedState = {"restarts": torch.tensor(restarts)}
    for i, best in enumerate(bests):
        assert best.z is not None
        assert best.labels is not None
        state |= {f"{i}.z": best.z, f"{i}.labels": best.labels, f"{i}.history": best.history}
        state[f"{i}.loss"] = torch.tensor(best.loss, dtype=torch.float64)
        state[f"{i}.counts"] = torch.tensor([best.iterations, best.evaluations, best.restarts])
        state[f"{i}.given"] = torch.tensor(best.from_warm_start)
        state[f"{i}.given_up"] = torch.tensor(best.given_up)
    return state


def unpack_bests(state: Mapping[str, Tensor], device: str) -> tuple[list[BestResult], int]:
    """Return the best results, on `device`, and the number of starts done, from a checkpoint that `pack_bests` made."""
    count = sum(name.endswith(".z") for name in state)
    bests = []
    for i in range(count):
        iterations, evaluations, restarts = map(int, state[f"{i}.counts"])
        bests.append(
            BestResult(
                float(state[f"{i}.loss"]),
                state[f"{i}.z"].to(device),
                state[f"{i}.labels"].to(device),
                state[f"{i}.history"].to(device),
                bool(state[f"{i}.given"]),
                iterations,
                evaluations,
                restarts,
                bool(state[f"{i}.given_up"]),
            )
        )
    return bests, int(state["restarts"])


@dataclass(frozen=True)
class _PrefixedMemory:
    """A view of a checkpoint storage that prepends a prefix to all keys."""

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


def prefix_memory(memory: Memory | None, prefix: str) -> Memory | None:
    """Return a view of a storage, or None, that several searches share: it puts `prefix` before all keys."""
    return None if memory is None else _PrefixedMemory(memory, prefix)
