"""Optimisers over many independent problems at once: latents and gradients are (P, D), one row a problem.

Rows never mix, so problems may leave between two steps.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Stepper(Protocol):
    """One optimisation under way."""

    def step(self, z: Tensor, gradient: Tensor, progress: float) -> Tensor:
        """From latents and their gradients, both (P, D), the next latents. progress: share of all steps that is done."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Go on with these problems only; rows: indices (Q,)."""
        ...


class Optimiser(Protocol):
    """A rule that starts steppers. period: gradient evaluations that count as one iteration of the attack."""

    @property
    def period(self) -> int: ...

    def start(self) -> Stepper: ...


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam (Kingma & Ba 2015), with steps cut to a tenth at the shares `decay_at` of the way.

    signed: use the sign of the gradient only (Geiping et al. 2020).
    """

    learning_rate: float = 0.1
    signed: bool = False
    decay_at: tuple[float, ...] = (3 / 8, 5 / 8, 7 / 8)
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    period: int = 1

    def start(self) -> "AdamStepper":
        return AdamStepper(self)


@dataclass
class AdamStepper:
    settings: Adam
    count: int = 0
    mean: Tensor | None = None
    square: Tensor | None = None

    def step(self, z: Tensor, gradient: Tensor, progress: float) -> Tensor:
        s, (beta1, beta2) = self.settings, self.settings.betas
        g = gradient.sign() if s.signed else gradient
        self.count += 1
        self.mean = (1 - beta1) * g if self.mean is None else beta1 * self.mean + (1 - beta1) * g
        self.square = (1 - beta2) * g * g if self.square is None else beta2 * self.square + (1 - beta2) * g * g
        mean = self.mean / (1 - beta1**self.count)
        root = (self.square / (1 - beta2**self.count)).sqrt()
        learning_rate = s.learning_rate * 0.1 ** sum(progress >= at for at in s.decay_at)
        return z - learning_rate * mean / (root + s.epsilon)

    def keep(self, rows: Tensor) -> None:
        if self.mean is not None and self.square is not None:
            self.mean, self.square = self.mean[rows], self.square[rows]


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """L-BFGS with fixed steps, exactly as `torch.optim.LBFGS` without a line search does for one problem.

    history: pairs that are remembered. period: torch's `max_iter`, the evaluations that DLG and CPL count as one iteration.
    """

    learning_rate: float = 1.0
    history: int = 100
    period: int = 20
    min_curvature: float = 1e-10
    min_descent: float = 1e-9

    def start(self) -> "LBFGSStepper":
        return LBFGSStepper(self)


@dataclass
class LBFGSStepper:
    """steps, changes: the last differences of latents and of gradients, each (P, D); rho: their inverse products, (P, 1).

    A pair without positive curvature has rho = 0, which leaves it without effect.
    """

    settings: LBFGS
    steps: list[Tensor] = field(default_factory=list)
    changes: list[Tensor] = field(default_factory=list)
    rho: list[Tensor] = field(default_factory=list)
    scale: Tensor | None = None
    previous: Tensor | None = None
    taken: Tensor | None = None

    def step(self, z: Tensor, gradient: Tensor, progress: float) -> Tensor:
        s = self.settings
        if self.previous is None or self.taken is None:
            length = (1 / gradient.abs().sum(dim=1, keepdim=True)).clamp(max=1) * s.learning_rate
            direction = -gradient
        else:
            self._remember(gradient)
            length = torch.full_like(gradient[:, :1], s.learning_rate)
            direction = self._direction(gradient)
        descends = (gradient * direction).sum(dim=1, keepdim=True) <= -s.min_descent
        self.previous = gradient
        self.taken = torch.where(descends, length * direction, torch.zeros_like(z))
        return z + self.taken

    def _remember(self, gradient: Tensor) -> None:
        assert self.previous is not None
        assert self.taken is not None
        change = gradient - self.previous
        curvature = (change * self.taken).sum(dim=1, keepdim=True)
        positive = curvature > self.settings.min_curvature
        rho = torch.where(positive, 1 / curvature, torch.zeros_like(curvature))
        newest = curvature / change.square().sum(dim=1, keepdim=True)
        old = torch.ones_like(newest) if self.scale is None else self.scale
        self.scale = torch.where(positive, newest, old)
        if not positive.any():
            return
        for kept, new in ((self.steps, self.taken), (self.changes, change), (self.rho, rho)):
            kept.append(new)
            del kept[: -self.settings.history]

    def _direction(self, gradient: Tensor) -> Tensor:
        assert self.scale is not None
        q = -gradient
        alphas = []
        for step, change, rho in zip(reversed(self.steps), reversed(self.changes), reversed(self.rho), strict=True):
            alpha = rho * (step * q).sum(dim=1, keepdim=True)
            q = q - alpha * change
            alphas.append(alpha)
        r = self.scale * q
        for step, change, rho, alpha in zip(self.steps, self.changes, self.rho, reversed(alphas), strict=True):
            beta = rho * (change * r).sum(dim=1, keepdim=True)
            r = r + (alpha - beta) * step
        return r

    def keep(self, rows: Tensor) -> None:
        self.steps = [t[rows] for t in self.steps]
        self.changes = [t[rows] for t in self.changes]
        self.rho = [t[rows] for t in self.rho]
        self.scale, self.previous, self.taken = (None if t is None else t[rows] for t in (self.scale, self.previous, self.taken))
