"""What a rule for the gradient of one batch is, for a client who computes by it and an attacker who knows it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.func import grad

from defenses.channel import Channel, transparent
from defenses.networks import penalty_of

Weights = Mapping[str, Tensor]
Gradient = dict[str, Tensor]


class GradientProblem(NamedTuple):
    """What a gradient is taken of.

    model:     the network, in the mode that it trains in; its weights are those that `forward` is given.
    forward:   from weights by name and x (N, *shape) in [0, 1], logits (N, K).
    criterion: from logits and y, (N,) or soft (N, K), the mean loss over the batch.
    penalised: whether what the network itself adds to the loss counts (`networks.penalty_of`).
    """

    model: nn.Module
    forward: Callable[[Weights, Tensor], Tensor]
    criterion: Callable[[Tensor, Tensor], Tensor]
    penalised: bool = True

    def loss(self, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        """The mean over the batch, 0-d."""
        loss = self.criterion(self.forward(weights, x), y)
        penalty = penalty_of(self.model)
        return loss if penalty is None or not self.penalised else loss + penalty


class LocalStep(NamedTuple):
    """One step of a client's training, as the server knows it.

    size:  examples in its batch. share: how much of its gradient the update holds: the learning rate, for plain SGD.
    """

    size: int
    share: float


class Facts(NamedTuple):
    """What the server knows of the training behind one update, where it asks what a rule makes of it.

    steps:  of the client. exact: whether zeros of a gradient are zeros of what is received: one step, no weight decay and no
    defense after it that fills them.
    """

    model: nn.Module
    steps: Sequence[LocalStep]
    exact: bool


def _sees_all(facts: Facts) -> Channel:
    return transparent


def _omits_none(facts: Facts) -> frozenset[str]:
    return frozenset()


def _expect_plain(problem: GradientProblem, weights: Weights, x: Tensor, y: Tensor) -> Gradient:
    gradient: Gradient = grad(problem.loss)(dict(weights), x, y)
    return gradient


class GradientRule(NamedTuple):
    """How a client computes the gradient of one batch.

    gradient: from (problem, weights, x, y, rng), the gradient by name and the mean loss, 0-d. The weights require gradients.
    expected: from (problem, weights, x, y), the gradient that it gives in the mean over its noise, as far as that can be told
              from the batch alone: differentiable and mappable, for an attacker who knows the rule.
    channel:  what that attacker expects beside it of the update. Its `learn` and `noise` are asked of a whole update.
    omitted:  names of tensors that the attacker had better leave out, on both sides.
    separate: whether it needs the gradient of each example by itself.
    """

    gradient: Callable[[GradientProblem, Weights, Tensor, Tensor, Generator], tuple[Gradient, Tensor]]
    expected: Callable[[GradientProblem, Weights, Tensor, Tensor], Gradient] = _expect_plain
    channel: Callable[[Facts], Channel] = _sees_all
    omitted: Callable[[Facts], frozenset[str]] = _omits_none
    separate: bool = False


def _plain(problem: GradientProblem, weights: Weights, x: Tensor, y: Tensor, rng: Generator) -> tuple[Gradient, Tensor]:
    loss = problem.loss(weights, x, y)
    gradient = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    return dict(zip(weights, gradient, strict=True)), loss


def plain() -> GradientRule:
    """The gradient of the mean loss."""
    return GradientRule(_plain)
