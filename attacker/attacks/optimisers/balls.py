"""Balls of norms: projections onto them, and the optimiser of Frank and Wolfe, whose latents never leave a Euclidean ball.

Rows of z, (P, D), are independent.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attacker.attacks.optimisers.first_order import OptimiserState

TINY_NORM = 1e-30


def project_onto_ball(z: Tensor, radius: float) -> Tensor:
    """Return for each row of z (P, D) the nearest vector whose Euclidean norm is at most `radius`."""
    result: Tensor = z * (radius / z.norm(dim=1, keepdim=True).clamp(min=TINY_NORM)).clamp(max=1)
    return result


def project_onto_l1_ball(z: Tensor, radius: float) -> Tensor:
    """Return for each row of z (P, D) the nearest vector whose sum of absolute values is at most `radius`, a number above 0.

    All absolute values of a row are lowered by one amount, at most to 0.
    Source: Duchi et al. 2008, "Efficient projections onto the l1-ball for learning in high dimensions", figure 1.
    """
    falling = z.abs().sort(dim=1, descending=True).values
    excess = falling.cumsum(dim=1) - radius
    count = torch.arange(1, z.shape[1] + 1, device=z.device)
    last = (falling * count > excess).sum(dim=1, keepdim=True)  # number of values that stay above 0
    lowered = (excess.gather(1, last - 1) / last).clamp(min=0)
    return z.sign() * (z.abs() - lowered).clamp(min=0)


@dataclass(frozen=True, kw_only=True)
class FrankWolfe:
    """The method of Frank and Wolfe (1956) on the Euclidean ball around 0, as in Jaggi 2013, algorithm 1.

    Each step goes to a point between z and the point of the ball where the linear approximation of the loss is least. No learning
    rate is needed.
    radius: of the ball, which contains the start. delay: number of steps that count as made at the start, so that the first step
    keeps a share delay / (delay + 2) of the start.
    """

    radius: float
    delay: int = 0
    period: int = 1
    remembers: ClassVar[int] = 0

    def start(self) -> "FrankWolfeStepper":
        return FrankWolfeStepper(self)


@dataclass
class FrankWolfeStepper:
    settings: FrankWolfe
    count: int = 0

    def step(self, z: Tensor, gradient: Tensor, loss: Tensor, progress: float) -> Tensor:
        share = 2 / (self.count + self.settings.delay + 2)
        self.count += 1
        minimiser = -self.settings.radius * gradient / gradient.norm(dim=1, keepdim=True).clamp(min=TINY_NORM)
        moved: Tensor = z + share * (minimiser - z)
        return moved

    def keep(self, rows: Tensor) -> None:
        """Do nothing: no row has a state of its own."""

    def get_state(self) -> OptimiserState:
        return {"count": torch.tensor(self.count)}

    def load(self, state: OptimiserState) -> None:
        self.count = int(state["count"]) if state else 0
