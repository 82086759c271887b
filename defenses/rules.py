"""Protocol of gradient rules: the client's computation of the gradient of one batch, and the attacker's model of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.func import grad

from defenses.channel import Channel, transparent
from defenses.networks import take_penalty

Weights = Mapping[str, Tensor]
Gradient = dict[str, Tensor]


class GradientProblem(NamedTuple):
    """The loss that is differentiated.

    model:     the network, in the mode (training or evaluation) in which the client trains it; `forward` replaces its weights.
    forward:   maps (weights by name, x (N, *shape) in [0, 1]) to logits (N, K).
    criterion: maps (logits, y) to the mean loss of the batch; y is (N,) or soft (N, K).
    penalised: whether the loss includes the terms that blocks of a network defense, such as PRECODE, add (`take_penalty`).
    """

    model: nn.Module
    forward: Callable[[Weights, Tensor], Tensor]
    criterion: Callable[[Tensor, Tensor], Tensor]
    penalised: bool = True

    def compute_loss(self, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of the batch, 0-d, including the network's penalty if `penalised` is set.

        The penalty that the forward pass stored in the network is removed from it in either case, see `take_penalty`.
        """
        loss = self.criterion(self.forward(weights, x), y)
        penalty = take_penalty(self.model)
        return loss if penalty is None or not self.penalised else loss + penalty


class LocalStep(NamedTuple):
    """One step of a client's training as the server knows it.

    size:  number of examples in the step's batch.
    share: absolute value of the coefficient that the step's gradient has in the update; for plain SGD, the learning rate.
    """

    size: int
    share: float


class TrainingContext(NamedTuple):
    """What the server knows about the training behind an update; input of `GradientRule.channel` and `GradientRule.omitted`.

    model: the network. steps: one `LocalStep` for each local step of the client.
    exact: whether zeros of a gradient arrive as zeros of the update: for one local step without weight decay, if no defense of
           the update follows.
    """

    model: nn.Module
    steps: Sequence[LocalStep]
    exact: bool


def _make_transparent(facts: TrainingContext) -> Channel:
    return transparent


def _omit_nothing(facts: TrainingContext) -> frozenset[str]:
    return frozenset()


def _expect_plain(problem: GradientProblem, weights: Weights, x: Tensor, y: Tensor) -> Gradient:
    gradient: Gradient = grad(problem.compute_loss)(dict(weights), x, y)
    return gradient


class GradientRule(NamedTuple):
    """A client's way to compute the gradient of one batch, and the functions by which an attacker simulates it.

    gradient: maps (problem, weights, x, y, rng) to the gradient by parameter name and the mean loss, 0-d. The passed weights must
              require gradients.
    expected: maps (problem, weights, x, y) to the gradient that an attacker simulates, by parameter name: without noise, and
              without effects that only the received update shows, such as which columns Soteria zeroed. Differentiable
              under `vmap`.
    channel:  maps `TrainingContext` to the channel (the attacker's model of a defense) with the effects on an update that
              `expected` lacks.
    omitted:  maps `TrainingContext` to the names of parameters that the attacker leaves out when it compares simulated and
              observed gradients.
    separate: whether the client computes the gradient of each example separately.
    """

    gradient: Callable[[GradientProblem, Weights, Tensor, Tensor, Generator], tuple[Gradient, Tensor]]
    expected: Callable[[GradientProblem, Weights, Tensor, Tensor], Gradient] = _expect_plain
    channel: Callable[[TrainingContext], Channel] = _make_transparent
    omitted: Callable[[TrainingContext], frozenset[str]] = _omit_nothing
    separate: bool = False


def _compute_plain(problem: GradientProblem, weights: Weights, x: Tensor, y: Tensor, rng: Generator) -> tuple[Gradient, Tensor]:
    loss = problem.compute_loss(weights, x, y)
    gradient = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    return dict(zip(weights, gradient, strict=True)), loss


def plain() -> GradientRule:
    """Return the rule of training without a gradient defense: the gradient of the mean loss of the batch."""
    return GradientRule(_compute_plain)
