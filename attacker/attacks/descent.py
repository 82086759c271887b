"""The loop of an optimisation attack over many problems at once; knows nothing of gradients or images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attacker.attacks.optimisers import Optimiser

Nested = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Stop:
    """When the search for one problem is over, in the optimiser's periods.

    tolerance: the loss at which it has converged; precision: the same as a share of what a guess that says nothing costs.
    patience:  periods without a decrease by the share `decrease` of its best loss after which a problem has come to its
    plateau: it is as good as it will be, or stuck, and does not hold up the others.
    stuck:     a loss above this share of the same, and above the tolerance, calls for another start, if one is left.
    """

    tolerance: float = 0.0
    precision: float = 0.0
    patience: int = 20
    decrease: float = 0.05
    stuck: float = 1e-3


@dataclass(frozen=True)
class Problems:
    """evaluate: from latents (P, D) and `per_problem`, gradients (P, D) and losses (P,). project: keeps latents allowed.

    per_problem: nested mappings of tensors, one row a problem. enough: (P,) losses at which each has converged.
    """

    evaluate: Callable[[Tensor, dict[str, Any]], tuple[Tensor, Tensor]]
    per_problem: Nested
    project: Callable[[Tensor], Tensor]
    enough: Tensor


@dataclass
class Found:
    """For each problem: its best latent, the loss there, the loss once a period, periods used, whether Ctrl-C cut it off."""

    z: list[Tensor]
    loss: list[float]
    history: list[Tensor]
    iterations: list[int]
    interrupted: list[bool]


@dataclass
class _Active:
    """The problems that still run, in rows; `ids` says which they are."""

    ids: Tensor
    z: Tensor
    best_z: Tensor
    best: Tensor
    enough: Tensor
    mark: Tensor | None = None
    waited: Tensor | None = None
    history: list[Tensor] = field(default_factory=list)

    def keep(self, rows: Tensor) -> None:
        self.ids, self.z, self.best_z, self.best = (t[rows] for t in (self.ids, self.z, self.best_z, self.best))
        self.enough = self.enough[rows]
        self.mark, self.waited = (None if t is None else t[rows] for t in (self.mark, self.waited))
        self.history = [t[rows] for t in self.history]


def descend(
    z: Tensor,
    problems: Problems,
    optimiser: Optimiser,
    steps: int,
    stop: Stop,
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> Found:
    """Minimise each row of z by itself for at most `steps` periods; rows that are over leave.

    Ctrl-C ends the search with the best so far.
    """
    count = len(z)
    infinite = torch.full((count,), float("inf"), device=z.device)
    active = _Active(ids=torch.arange(count, device=z.device), z=z, best_z=z.clone(), best=infinite, enough=problems.enough)
    found = Found([z[i] for i in range(count)], [float("inf")] * count, [torch.empty(0)] * count, [0] * count, [False] * count)
    per_problem = dict(problems.per_problem)
    stepper = optimiser.start()
    try:
        for iteration in range(1, steps + 1):
            for inner in range(optimiser.period):
                gradient, loss = problems.evaluate(active.z, per_problem)
                _remember_best(active, loss)
                share = (iteration - 1 + inner / optimiser.period) / steps
                active.z = problems.project(stepper.step(active.z, gradient, share))
            over = _over(active, stop)
            if over.any() or iteration == steps:
                finished = over if iteration < steps else torch.ones_like(over)
                _put_down(active, finished, found, iteration)
                rows = torch.nonzero(~finished).flatten()
                if not len(rows):
                    break
                active.keep(rows)
                stepper.keep(rows)
                per_problem = _select(per_problem, rows)
            if progress is not None:
                progress(iteration, steps, f"{len(active.ids)} of {count} left, loss {float(active.best.median()):.3g}")
    except KeyboardInterrupt:
        for i in active.ids.tolist():
            found.interrupted[i] = True
        _put_down(active, torch.ones_like(active.best, dtype=torch.bool), found, len(active.history))
    return found


def _remember_best(active: _Active, loss: Tensor) -> None:
    better = loss < active.best
    active.best = torch.where(better, loss, active.best)
    active.best_z = torch.where(better[:, None], active.z, active.best_z)
    if active.mark is None:
        active.mark, active.waited = loss, torch.zeros_like(loss)


def _over(active: _Active, stop: Stop) -> Tensor:
    """Which problems are over after this iteration."""
    assert active.mark is not None
    assert active.waited is not None
    active.history.append(active.best)
    improved = active.best < active.mark * (1 - stop.decrease)
    active.mark = torch.where(improved, active.best, active.mark)
    active.waited = torch.where(improved, 0.0, active.waited + 1)
    converged = active.best <= active.enough
    lost = ~torch.isfinite(active.z).all(dim=1)
    return converged | lost | (active.waited >= stop.patience)


def _put_down(active: _Active, finished: Tensor, found: Found, iteration: int) -> None:
    history = torch.stack(active.history, dim=1) if active.history else active.best[:, None]
    for row in torch.nonzero(finished).flatten().tolist():
        i, loss = int(active.ids[row]), float(active.best[row])
        found.z[i], found.loss[i], found.history[i] = active.best_z[row], loss, history[row]
        found.iterations[i] = iteration


def _select(nested: Nested, rows: Tensor) -> dict[str, Any]:
    return {name: _select(t, rows) if isinstance(t, Mapping) else t[rows] for name, t in nested.items()}
