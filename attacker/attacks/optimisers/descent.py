"""The loop of an optimisation attack over many problems at once; knows nothing of gradients or images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attacker.attacks.optimisers.first_order import Optimiser, State, Stepper

Nested = Mapping[str, Any]
Checkpoint = Callable[[Callable[[], State]], None]
"""Is called after every period with a function that gives the state of the search; it decides whether to ask for it."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """When the search for one problem is over, in the optimiser's periods.

    tolerance: the loss at which it has converged; precision: the same as a share of what a guess that says nothing costs.
    patience:  periods without a decrease by the share `decrease` of its best loss after which a problem has come to its
    plateau: it is as good as it will be, or stuck, and does not hold up the others.
    stuck:     a loss above this share of the same, and above the tolerance, calls for another start, if one is left.
    give_up:   share of all steps after which a problem is over whose best loss is still above the share `hopeless` of the loss of
    its start, which the null begins with as well; 0 never gives up. Neither value is calibrated, so that it is off by default.
    """

    tolerance: float = 0.0
    precision: float = 0.0
    patience: int = 20
    decrease: float = 0.05
    stuck: float = 1e-3
    give_up: float = 0.0
    hopeless: float = 0.9

    def is_time_to_give_up(self, iteration: int, steps: int) -> bool:
        """Whether this is the iteration after which hopeless problems are over."""
        return self.give_up > 0 and iteration == max(1, round(self.give_up * steps))


PLATEAU = Stop(precision=1e-8, patience=10, decrease=0.05)
"""Stops a search of L-BFGS that no longer decreases its loss."""


@dataclass(frozen=True)
class Problems:
    """evaluate: from latents (P, D), `per_problem`, and the share of all steps that is done, gradients (P, D) and losses (P,).

    per_problem: nested mappings of tensors, one row a problem. project: keeps latents allowed.
    enough: (P,) losses at which each has converged. anew: the share of the steps from which on losses are no longer those of
    before (they were computed more coarsely): the best so far is then forgotten.
    """

    evaluate: Callable[[Tensor, dict[str, Any], float], tuple[Tensor, Tensor]]
    per_problem: Nested
    project: Callable[[Tensor], Tensor]
    enough: Tensor
    anew: float = 0.0


@dataclass
class Found:
    """For each problem: its best latent, the loss there, the loss once a period, periods used, whether Ctrl-C cut it off."""

    z: list[Tensor]
    loss: list[float]
    history: list[Tensor]
    iterations: list[int]
    interrupted: list[bool]

    @classmethod
    def nothing(cls, z: Tensor) -> "Found":
        count = len(z)
        return cls(list(z), [float("inf")] * count, [torch.empty(0)] * count, [0] * count, [False] * count)

    def state(self) -> State:
        """The histories lie one after the other, each as long as its problem's iterations."""
        return {
            "z": torch.stack(self.z),
            "loss": torch.tensor(self.loss, dtype=torch.float64),
            "history": torch.cat([h.to(self.z[0]) for h in self.history]),
            "iterations": torch.tensor(self.iterations),
        }

    @classmethod
    def of(cls, state: State) -> "Found":
        iterations = state["iterations"].tolist()
        histories = list(torch.split(state["history"], iterations))
        return cls(list(state["z"]), state["loss"].tolist(), histories, iterations, [False] * len(iterations))


@dataclass
class _Active:
    """The problems that still run, in rows; `ids` says which they are.

    history: their best losses, (P,) a period. first: (P,) the losses of their starts.
    """

    ids: Tensor
    z: Tensor
    best_z: Tensor
    best: Tensor
    mark: Tensor
    waited: Tensor
    first: Tensor
    history: list[Tensor] = field(default_factory=list)

    @classmethod
    def at(cls, z: Tensor) -> "_Active":
        infinite = z.new_full((len(z),), float("inf"))
        return cls(torch.arange(len(z), device=z.device), z, z.clone(), infinite, infinite, torch.zeros_like(infinite), infinite)

    @property
    def iteration(self) -> int:
        """Periods that are over."""
        return len(self.history)

    def forget(self) -> None:
        """Look for the best, and for a plateau, from here on."""
        self.best, self.mark = (torch.full_like(t, float("inf")) for t in (self.best, self.mark))
        self.waited = torch.zeros_like(self.waited)

    def keep(self, rows: Tensor) -> None:
        for name in _ROWS:
            setattr(self, name, getattr(self, name)[rows])
        self.history = [t[rows] for t in self.history]

    def state(self) -> State:
        history = torch.stack(self.history) if self.history else self.best.new_empty(0, len(self.best))
        rows = {name: getattr(self, name) for name in _ROWS}
        return {**rows, "history": history}

    @classmethod
    def of(cls, state: State) -> "_Active":
        rows = {name: state[name] for name in _ROWS}
        return cls(**rows, history=list(state["history"]))


_ROWS = ("ids", "z", "best_z", "best", "mark", "waited", "first")


def descend(
    z: Tensor,
    problems: Problems,
    optimiser: Optimiser,
    steps: int,
    stop: Stop,
    *,
    progress: Callable[[int, int, str], None] | None = None,
    checkpoint: Checkpoint | None = None,
    resume: State | None = None,
) -> Found:
    """Minimise each row of z by itself for at most `steps` periods; rows that are over leave.

    Ctrl-C ends the search with the best so far. resume: what `checkpoint` was given by an earlier call with the same arguments;
    the search goes on from there, and comes to exactly what it would have come to.
    """
    active, found, stepper = _taken_up(resume, optimiser) if resume else (_Active.at(z), Found.nothing(z), optimiser.start())
    per_problem, enough = _select(problems.per_problem, active.ids), problems.enough[active.ids]
    try:
        while active.iteration < steps:
            _period(active, stepper, problems, per_problem, optimiser.period, steps)
            over = _over(active, stop, enough, steps)
            if over.any() or active.iteration == steps:
                finished = over if active.iteration < steps else torch.ones_like(over)
                _put_down(active, finished, found)
                rows = torch.nonzero(~finished).flatten()
                if not len(rows):
                    break
                active.keep(rows)
                stepper.keep(rows)
                per_problem, enough = _select(per_problem, rows), enough[rows]
            if progress is not None:
                left = f"{len(active.ids)} of {len(z)} left"
                progress(active.iteration, steps, f"{left}, loss {float(active.best.median()):.3g}")
            if checkpoint is not None:
                checkpoint(lambda: _state(active, found, stepper))
    except KeyboardInterrupt:
        for i in active.ids.tolist():
            found.interrupted[i] = True
        _put_down(active, torch.ones_like(active.best, dtype=torch.bool), found)
    return found


def _period(
    active: _Active, stepper: Stepper, problems: Problems, per_problem: dict[str, Any], evaluations: int, steps: int
) -> None:
    for inner in range(evaluations):
        share = (active.iteration + inner / evaluations) / steps
        gradient, loss = problems.evaluate(active.z, per_problem, share)
        if 0 <= share - problems.anew < 1 / (evaluations * steps) and problems.anew:
            active.forget()
        _remember_best(active, loss)
        active.z = problems.project(stepper.step(active.z, gradient, loss, share))


def _remember_best(active: _Active, loss: Tensor) -> None:
    better = loss < active.best
    active.best = torch.where(better, loss, active.best)
    active.best_z = torch.where(better[:, None], active.z, active.best_z)
    active.mark = torch.where(active.mark.isinf(), loss, active.mark)  # the first loss of all
    active.first = torch.where(active.first.isinf(), loss, active.first)


def _over(active: _Active, stop: Stop, enough: Tensor, steps: int) -> Tensor:
    """Which problems are over after this iteration."""
    active.history.append(active.best)
    improved = active.best < active.mark * (1 - stop.decrease)
    active.mark = torch.where(improved, active.best, active.mark)
    active.waited = torch.where(improved, 0.0, active.waited + 1)
    lost = ~torch.isfinite(active.z).all(dim=1)
    over = (active.best <= enough) | lost | (active.waited >= stop.patience)
    if stop.is_time_to_give_up(active.iteration, steps):
        over |= active.best > stop.hopeless * active.first
    return over


def _put_down(active: _Active, finished: Tensor, found: Found) -> None:
    history = torch.stack(active.history, dim=1) if active.history else active.best[:, None]
    for row in torch.nonzero(finished).flatten().tolist():
        i, loss = int(active.ids[row]), float(active.best[row])
        found.z[i], found.loss[i], found.history[i] = active.best_z[row], loss, history[row]
        found.iterations[i] = active.iteration


def _state(active: _Active, found: Found, stepper: Stepper) -> State:
    parts = {"active": active.state(), "found": found.state(), "stepper": stepper.state()}
    return {f"{part}.{name}": t for part, state in parts.items() for name, t in state.items()}


def best_of(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of what `checkpoint` was given: the best latent of each problem so far, (P, D), and the loss there, (P,)."""
    z, loss, ids = state["found.z"].clone(), state["found.loss"].clone(), state["active.ids"].to(state["found.loss"].device)
    z[state["active.ids"]] = state["active.best_z"]
    loss[ids] = state["active.best"].to(loss)
    return z, loss


def _taken_up(state: State, optimiser: Optimiser) -> tuple[_Active, Found, Stepper]:
    parts: dict[str, State] = {"active": {}, "found": {}, "stepper": {}}
    for key, tensor in state.items():
        part, _, name = key.partition(".")
        parts[part][name] = tensor
    stepper = optimiser.start()
    stepper.load(parts["stepper"])
    return _Active.of(parts["active"]), Found.of(parts["found"]), stepper


def _select(nested: Nested, rows: Tensor) -> dict[str, Any]:
    return {name: _select(t, rows) if isinstance(t, Mapping) else t[rows] for name, t in nested.items()}
