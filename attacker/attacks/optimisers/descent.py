"""The optimisation loop for a batch of independent problems, with checkpoints; independent of attacks.

Shapes: P problems, D coordinates of the latent, the variable that is optimised.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from attacker.attacks.optimisers.first_order import Optimiser, OptimiserState, Stepper
from attacker.attacks.optimisers.stopping import Stop

Nested = Mapping[str, Any]
Checkpoint = Callable[[Callable[[], OptimiserState]], None]
"""Callback that is called after every iteration with a function that returns the state of the search. The callback decides
whether to call that function and save the state."""


@dataclass(frozen=True)
class Problems:
    """A batch of independent minimisation problems.

    evaluate:    function of latents (P, D), `per_problem`, and the share of steps done, in [0, 1), that returns gradients (P, D)
                 and losses (P,). P is the number of problems whose search still runs, and `per_problem` then has only their rows.
    per_problem: data of the problems, nested mappings of tensors with one row per problem.
    project:     function that returns the allowed latents nearest to latents (P, D), such as those in a box.
    enough:      losses (P,) at or below which the problems have converged.
    least:       losses (P,) at or below which a problem is not given up because of a high loss (`Stop.unexplained`); None for no
                 such losses. The test `Stop.stall` ignores them.
    floor:       losses (P,) that the solutions have in expectation, because of known noise; None if there is none.
    plain:       latents (P, D) of examples without content, such as grey images, for `Stop.stall`; None to ignore that test.
    anew:        share of the steps after which the loss function changes from a coarse one to the exact one. Problems that are
                 still searched then drop their best results, since losses before and after cannot be compared. 0 if it never
                 changes.
    """

    evaluate: Callable[[Tensor, dict[str, Any], float], tuple[Tensor, Tensor]]
    per_problem: Nested
    project: Callable[[Tensor], Tensor]
    enough: Tensor
    anew: float = 0.0
    least: Tensor | None = None
    floor: Tensor | None = None
    plain: Tensor | None = None


@dataclass
class Minima:
    """The results of a search: lists with one entry per problem.

    z: best latent (D,). loss: loss at z. history: the best loss after each iteration, a tensor. iterations: how many were made.
    interrupted: whether Ctrl-C stopped the search for this problem. given_up: whether the search was stopped as hopeless, see
    `Stop`.
    """

    z: list[Tensor]
    loss: list[float]
    history: list[Tensor]
    iterations: list[int]
    interrupted: list[bool]
    given_up: list[bool]

    @classmethod
    def empty(cls, z: Tensor) -> "Minima":
        count = len(z)
        none = [False] * count
        return cls(list(z), [float("inf")] * count, [torch.empty(0)] * count, [0] * count, none, list(none))

    def get_state(self) -> OptimiserState:
        """Return the results as tensors by name, for a checkpoint; `of` reads them back. `interrupted` is not saved.

        The loss histories of all problems form one tensor, "history", one after the other; "iterations" holds their
        lengths.
        """
        return {
            "z": torch.stack(self.z),
            "loss": torch.tensor(self.loss, dtype=torch.float64),
            "history": torch.cat([h.to(self.z[0]) for h in self.history]),
            "iterations": torch.tensor(self.iterations),
            "given_up": torch.tensor(self.given_up),
        }

    @classmethod
    def of(cls, state: OptimiserState) -> "Minima":
        iterations = state["iterations"].tolist()
        histories = list(torch.split(state["history"], iterations))
        none = [False] * len(iterations)
        return cls(list(state["z"]), state["loss"].tolist(), histories, iterations, none, state["given_up"].tolist())


@dataclass
class _Active:
    """The problems whose search still runs, one row each.

    ids:     their row numbers in the latents that the search began with. z: current latents (P, D).
    best_z, best: best latents so far, (P, D), and their losses, (P,).
    mark:    best loss (P,) when the search last made progress (see `Stop.decrease`). waited: number of iterations (P,) since.
    first:   losses (P,) at the starting points, infinite before they are known.
    history: for each iteration, the best losses (P,) after it.
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
    def from_start(cls, z: Tensor) -> "_Active":
        infinite = z.new_full((len(z),), float("inf"))
        return cls(torch.arange(len(z), device=z.device), z, z.clone(), infinite, infinite, torch.zeros_like(infinite), infinite)

    @property
    def iteration(self) -> int:
        """Return the number of iterations done."""
        return len(self.history)

    def forget(self) -> None:
        """Set the best losses to infinity, and restart the count of iterations without progress."""
        self.best, self.mark = (torch.full_like(t, float("inf")) for t in (self.best, self.mark))
        self.waited = torch.zeros_like(self.waited)

    def keep(self, rows: Tensor) -> None:
        for name in _TENSOR_FIELDS:
            setattr(self, name, getattr(self, name)[rows])
        self.history = [t[rows] for t in self.history]

    def get_state(self) -> OptimiserState:
        history = torch.stack(self.history) if self.history else self.best.new_empty(0, len(self.best))
        rows = {name: getattr(self, name) for name in _TENSOR_FIELDS}
        return {**rows, "history": history}

    @classmethod
    def of(cls, state: OptimiserState) -> "_Active":
        return cls(**{name: state[name] for name in _TENSOR_FIELDS}, history=list(state["history"]))


_TENSOR_FIELDS = ("ids", "z", "best_z", "best", "mark", "waited", "first")


def descend(
    z: Tensor,
    problems: Problems,
    optimiser: Optimiser,
    steps: int,
    stop: Stop,
    *,
    progress: Callable[[int, int, str], None] | None = None,
    checkpoint: Checkpoint | None = None,
    resume: OptimiserState | None = None,
) -> Minima:
    """Minimise the loss of each row of z, (P, D), independently, in at most `steps` iterations, and return the best latents.

    Problems that are finished leave the batch. Ctrl-C stops the search, and the best results so far are returned.

    progress:   callback for a status line, called after each iteration that leaves problems to search, with the number of
                iterations done, `steps`, and a text with the median best loss.
    checkpoint: callback that may save the state, called after the same iterations, see `Checkpoint`.
    resume:     a state saved by an earlier call with the same arguments; the search continues from it.
    """
    active, minima, stepper = (
        _resume(resume, optimiser) if resume else (_Active.from_start(z), Minima.empty(z), optimiser.start())
    )
    per_problem, enough = _select(problems.per_problem, active.ids), problems.enough[active.ids]
    try:
        while active.iteration < steps:
            _run_iteration(active, stepper, problems, per_problem, optimiser.period, steps)
            finished = _find_ended(active, stop, enough)
            hopeless = ~finished & _find_hopeless(active, stop, problems, per_problem, steps)
            for i in active.ids[hopeless].tolist():
                minima.given_up[i] = True
            finished |= hopeless | (active.iteration == steps)
            if finished.any():
                _store_results(active, finished, minima)
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
                checkpoint(lambda: _collect_state(active, minima, stepper))
    except KeyboardInterrupt:
        for i in active.ids.tolist():
            minima.interrupted[i] = True
        _store_results(active, torch.ones_like(active.best, dtype=torch.bool), minima)
    return minima


def _run_iteration(
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


def _find_ended(active: _Active, stop: Stop, enough: Tensor) -> Tensor:
    """Record the best losses, and return a mask (P,) of the active problems that end now, apart from hopeless ones.

    A problem ends if it has converged, has waited too long for progress, or has latents that are not finite.
    enough: losses (P,) of the active problems, see `Problems`.
    """
    active.history.append(active.best)
    improved = active.best < active.mark * (1 - stop.decrease)
    active.mark = torch.where(improved, active.best, active.mark)
    active.waited = torch.where(improved, 0.0, active.waited + 1)
    lost = ~torch.isfinite(active.z).all(dim=1)
    return (active.best <= enough) | lost | (active.waited >= stop.patience)


def _find_hopeless(active: _Active, stop: Stop, problems: Problems, per_problem: dict[str, Any], steps: int) -> Tensor:
    """Return a mask (P,) of the active problems that are given up after this iteration, see `Stop`.

    Plain examples are evaluated only if the test `Stop.stall` is due, and only if some problem is not given up already because of
    its high loss.
    per_problem: data of the active problems.
    """
    none = torch.zeros_like(active.best)
    floor = none if problems.floor is None else problems.floor[active.ids]
    loss, first = active.best - floor, active.first - floor
    hopeless = torch.zeros_like(none, dtype=torch.bool)
    if isfinite(limit := stop.get_hopeless_loss(active.iteration, steps)):
        hopeless = loss > limit * first
        hopeless &= True if problems.least is None else active.best > problems.least[active.ids]
    stall = stop.get_stall(active.iteration, steps)
    if stall is not None and problems.plain is not None and not hopeless.all():
        _, plain = problems.evaluate(problems.plain[active.ids], per_problem, active.iteration / steps)
        hopeless |= stall.find(loss=loss, earlier=active.history[stall.since - 1] - floor, plain=plain - floor)
    return hopeless


def _store_results(active: _Active, finished: Tensor, minima: Minima) -> None:
    history = torch.stack(active.history, dim=1) if active.history else active.best[:, None]
    for row in torch.nonzero(finished).flatten().tolist():
        i, loss = int(active.ids[row]), float(active.best[row])
        minima.z[i], minima.loss[i], minima.history[i] = active.best_z[row], loss, history[row]
        minima.iterations[i] = active.iteration


def _collect_state(active: _Active, minima: Minima, stepper: Stepper) -> OptimiserState:
    parts = {"active": active.get_state(), "found": minima.get_state(), "stepper": stepper.get_state()}
    return {f"{part}.{name}": t for part, state in parts.items() for name, t in state.items()}


def get_best(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the best latents so far, (P, D), and their losses, (P,), of all problems from a saved state of `descend`."""
    z, loss, ids = state["found.z"].clone(), state["found.loss"].clone(), state["active.ids"].to(state["found.loss"].device)
    z[state["active.ids"]] = state["active.best_z"]
    loss[ids] = state["active.best"].to(loss)
    return z, loss


def _resume(state: OptimiserState, optimiser: Optimiser) -> tuple[_Active, Minima, Stepper]:
    parts: dict[str, OptimiserState] = {"active": {}, "found": {}, "stepper": {}}
    for key, tensor in state.items():
        part, _, name = key.partition(".")
        parts[part][name] = tensor
    stepper = optimiser.start()
    stepper.load(parts["stepper"])
    return _Active.of(parts["active"]), Minima.of(parts["found"]), stepper


def _select(nested: Nested, rows: Tensor) -> dict[str, Any]:
    """Return the rows with the indices `rows`, ascending, of all tensors. Nothing is copied if `rows` names all rows."""
    return {
        name: _select(t, rows) if isinstance(t, Mapping) else (t if len(rows) == len(t) else t[rows])
        for name, t in nested.items()
    }
