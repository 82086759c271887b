"""What a client would have computed from a guess."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

from defenses.channel import Channel
from fedsim.wire.observation import DataSpec, Training

Weights = Mapping[str, Tensor]
Gradient = dict[str, Tensor]


def gradient_of(model: nn.Module, data: DataSpec) -> Callable[[Weights, Tensor, Tensor], Gradient]:
    """A function from weights, x (N, *shape) in [0, 1] and y (N,), or soft (N, K), to dL/dw of the mean cross-entropy."""

    def loss(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, dict(weights), (data.normalise(x),)), y)

    gradient: Callable[[Weights, Tensor, Tensor], Gradient] = grad(loss)
    return gradient


def total_step(training: Training, steps: int) -> float:
    """How much of one constant gradient `steps` local steps add up to: `steps * learning_rate` for plain SGD."""
    velocity = total = 0.0
    for _ in range(steps):
        velocity = training.momentum * velocity + 1
        total += training.learning_rate * velocity
    return total


def as_gradient(update: Mapping[str, Tensor], weights: Weights, training: Training, steps: int) -> Gradient:
    """The gradient that an update stands for, by name.

    Exact for one step. For more, all of them are taken as one batch at the weights that were sent (AGIC, eq. 4).
    """
    scale = total_step(training, steps)
    return {name: -u / scale - training.weight_decay * weights[name] for name, u in update.items()}


def through(channel: Channel, gradient: Mapping[str, Tensor], weights: Weights, training: Training, steps: int) -> Gradient:
    """The gradient that would be read off the update that `gradient` leads to, after the defense."""
    scale = total_step(training, steps)
    update = {name: -scale * (g + training.weight_decay * weights[name]) for name, g in gradient.items()}
    return as_gradient(channel.expect(update), weights, training, steps)
