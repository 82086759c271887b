"""An optimiser that changes one part of the variables after another, each with a new state of the optimiser inside."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from attacker.attacks.optimisers.first_order import Optimiser, OptimiserState, Stepper, add_prefix, remove_prefix


@dataclass(frozen=True)
class PhasedOptimiser:
    """The settings of an optimiser with phases, in each of which only one part of the variables changes.

    The first step of each later phase only returns to the best latents so far.

    inner: the optimiser of each phase, whose schedules run from the beginning to the end of the phase.
    sizes: number of variables in each part of the latent of one example, in order; one phase per part. examples: number V of
    examples, whose latents lie one after the other at the beginning of a latent vector. The variables after these latents are
    optimised in all phases. lengths: relative lengths of the phases; empty for equal ones.
    """

    inner: Optimiser
    sizes: tuple[int, ...]
    examples: int
    lengths: tuple[int, ...] = ()

    @property
    def period(self) -> int:
        return self.inner.period

    @property
    def remembers(self) -> int:
        return self.inner.remembers + 1

    def start(self) -> "PhasedStepper":
        return PhasedStepper(self, self.inner.start())

    def locate(self, progress: float) -> tuple[int, float]:
        """Return the phase at a share `progress` in [0, 1] of all steps, and the share of that phase that is over."""
        lengths = self.lengths or (1,) * len(self.sizes)
        ends = list(accumulate(lengths))
        at = progress * ends[-1]
        phase = min(bisect_right(ends, at + 1e-9), len(ends) - 1)
        return phase, max(0.0, (at - ends[phase] + lengths[phase]) / lengths[phase])

    def find_free(self, phase: int, z: Tensor) -> Tensor:
        """Return the mask (D,) of the variables that change in a phase, for latents z (P, D)."""
        parts = torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes)).repeat(self.examples)
        free = torch.ones(z.shape[1], dtype=torch.bool)
        free[: len(parts)] = parts == phase
        return free.to(z.device)


@dataclass
class PhasedStepper:
    """A running optimisation with phases. The state of `inner` is new at the beginning of each phase.

    best, least: latents (P, D) of the lowest loss so far, at which a new phase begins, and their losses (P,).
    free: mask of the variables that change in the present phase; None before it is computed.
    """

    settings: PhasedOptimiser
    inner: Stepper
    phase: int = 0
    best: Tensor | None = None
    least: Tensor | None = None
    free: Tensor | None = None

    def step(self, z: Tensor, gradient: Tensor, loss: Tensor, progress: float) -> Tensor:
        better = None if self.least is None else loss < self.least
        self.best = z if better is None or self.best is None else torch.where(better[:, None], z, self.best)
        self.least = loss if better is None or self.least is None else torch.where(better, loss, self.least)
        phase, within = self.settings.locate(progress)
        if phase != self.phase:
            self.phase, self.inner, self.free = phase, self.settings.inner.start(), None
            return self.best  # the gradient of these latents is not known yet
        self.free = self.settings.find_free(phase, z) if self.free is None else self.free
        moved = self.inner.step(z, torch.where(self.free, gradient, 0), loss, within)
        return torch.where(self.free, moved, z)

    def keep(self, rows: Tensor) -> None:
        if self.best is not None and self.least is not None:
            self.best, self.least = self.best[rows], self.least[rows]
        self.inner.keep(rows)

    def get_state(self) -> OptimiserState:
        if self.best is None or self.least is None:
            return {}
        state = {"phase": torch.tensor(self.phase), "best": self.best, "least": self.least}
        return {**state, **add_prefix("inner", self.inner.get_state())}

    def load(self, state: OptimiserState) -> None:
        self.phase = int(state["phase"]) if state else 0
        self.best, self.least = state.get("best"), state.get("least")
        self.inner.load(remove_prefix("inner", state))
