"""First-order optimisers for a batch of independent problems: latents and gradients are (P, D), losses (P,).

Rows never interact, so problems can leave the batch between two steps. L-BFGS is in the module `lbfgs`.
"""

from dataclasses import dataclass
from math import cos, pi
from typing import ClassVar, Protocol

import torch
from torch import Tensor

OptimiserState = dict[str, Tensor]
"""The state of a running computation as tensors by name, so that it can be saved and resumed."""


class Stepper(Protocol):
    """Protocol of a running optimisation of a batch of problems; it holds the optimiser's state, such as momentum."""

    def step(self, z: Tensor, gradient: Tensor, loss: Tensor, progress: float) -> Tensor:
        """Return the latents (P, D) at which to evaluate next, given the last latents z, their gradients (P, D) and losses (P,).

        progress: share of the steps done, in [0, 1), for learning rate schedules.
        """
        ...

    def keep(self, rows: Tensor) -> None:
        """Keep only the present rows (problems) with the indices `rows`, (Q,)."""
        ...

    def get_state(self) -> OptimiserState:
        """Return the state that earlier steps left, as tensors by name; empty before the first step.

        Later steps may overwrite these tensors, so copy them to keep them.
        """
        ...

    def load(self, state: OptimiserState) -> None:
        """Restore a state that `get_state` returned, in a new stepper of an optimiser with the same settings."""
        ...


class RowState:
    """The state of a stepper that consists of tensors with one row per problem.

    rows: these tensors by name; empty before the first step.
    """

    def __init__(self) -> None:
        self.rows: OptimiserState = {}

    def keep(self, rows: Tensor) -> None:
        self.rows = {name: t[rows] for name, t in self.rows.items()}

    def get_state(self) -> OptimiserState:
        return dict(self.rows)

    def load(self, state: OptimiserState) -> None:
        self.rows = dict(state)


def add_prefix(prefix: str, state: OptimiserState) -> OptimiserState:
    """Return the tensors of a part of an optimiser's state under names that begin with the part's name and a dot."""
    return {f"{prefix}.{name}": t for name, t in state.items()}


def remove_prefix(prefix: str, state: OptimiserState) -> OptimiserState:
    """Return the tensors that `add_prefix` gave this prefix, under their own names."""
    return {name.removeprefix(f"{prefix}."): t for name, t in state.items() if name.startswith(f"{prefix}.")}


class Optimiser(Protocol):
    """Protocol of the settings of an optimiser; `start` returns a new `Stepper` with them.

    period:    number of gradient evaluations that count as one iteration of the attack.
    remembers: maximum number of vectors of the latent's size that a stepper stores per problem.
    """

    @property
    def period(self) -> int: ...

    @property
    def remembers(self) -> int: ...

    def start(self) -> Stepper: ...


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Gradient descent with heavy-ball momentum (Polyak 1964), as `torch.optim.SGD` with these settings."""

    learning_rate: float = 0.1
    momentum: float = 0.9
    period: int = 1
    remembers: ClassVar[int] = 1

    def start(self) -> "SGDStepper":
        return SGDStepper(self)


class SGDStepper(RowState):
    def __init__(self, settings: SGD) -> None:
        super().__init__()
        self.settings = settings

    def step(self, z: Tensor, gradient: Tensor, loss: Tensor, progress: float) -> Tensor:
        velocity = self.rows["velocity"] = self.settings.momentum * self.rows.get("velocity", 0) + gradient
        return z - self.settings.learning_rate * velocity


@dataclass(frozen=True, kw_only=True)
class Adagrad:
    """Adagrad with a diagonal preconditioner (Duchi et al. 2011, section 1.1), as `torch.optim.Adagrad` with these settings."""

    learning_rate: float = 0.1
    epsilon: float = 1e-10
    period: int = 1
    remembers: ClassVar[int] = 1

    def start(self) -> "AdagradStepper":
        return AdagradStepper(self)


class AdagradStepper(RowState):
    def __init__(self, settings: Adagrad) -> None:
        super().__init__()
        self.settings = settings

    def step(self, z: Tensor, gradient: Tensor, loss: Tensor, progress: float) -> Tensor:
        squares = self.rows["squares"] = self.rows.get("squares", 0) + gradient.square()
        return z - self.settings.learning_rate * gradient / (squares.sqrt() + self.settings.epsilon)


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam (Kingma & Ba 2015) with two schedules for the learning rate, which are multiplied.

    decay_at: shares of the steps, in [0, 1], at each of which the learning rate is divided by 10; empty for no such schedule.
    signed:   replace the gradient by its sign (Geiping et al. 2020).
    cosine:   share of the learning rate at the end of a cosine schedule (`CosineAnnealingLR` of PyTorch); 1 for no such schedule.
    betas:    decay rates of the averages of gradients and of their squares, in [0, 1).
    """

    learning_rate: float = 0.1
    signed: bool = False
    decay_at: tuple[float, ...] = (3 / 8, 5 / 8, 7 / 8)
    cosine: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    period: int = 1
    remembers: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"beta1 and beta2, the decay rates of Adam, must be at least 0 and below 1, got {self.betas}")

    def compute_rate(self, progress: float) -> float:
        """Return the learning rate after a share `progress`, in [0, 1], of the steps."""
        decay = 0.1 ** sum(progress >= at for at in self.decay_at)
        return self.learning_rate * decay * (self.cosine + (1 - self.cosine) * (1 + cos(pi * progress)) / 2)

    def start(self) -> "AdamStepper":
        return AdamStepper(self)


class AdamStepper(RowState):
    def __init__(self, settings: Adam) -> None:
        super().__init__()
        self.settings, self.count = settings, 0

    def step(self, z: Tensor, gradient: Tensor, loss: Tensor, progress: float) -> Tensor:
        s, (beta1, beta2) = self.settings, self.settings.betas
        g = gradient.sign() if s.signed else gradient
        self.count += 1
        first = self.rows["mean"] = beta1 * self.rows.get("mean", 0) + (1 - beta1) * g
        second = self.rows["square"] = beta2 * self.rows.get("square", 0) + (1 - beta2) * g * g
        mean, root = first / (1 - beta1**self.count), (second / (1 - beta2**self.count)).sqrt()
        return z - s.compute_rate(progress) * mean / (root + s.epsilon)

    def get_state(self) -> OptimiserState:
        return {"count": torch.tensor(self.count), **self.rows} if self.rows else {}

    def load(self, state: OptimiserState) -> None:
        super().load({name: t for name, t in state.items() if name != "count"})
        self.count = int(state["count"]) if state else 0
