"""What a client would have computed from a guess."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import replace_all_batch_norm_modules_

from attacker.attacks.simulation.gradients import NOTHING, Gradient, Gradients, Weights, gradient_of
from defenses.channel import Channel, ChannelFacts, compose, transparent
from defenses.networks import hidden
from defenses.rules import Facts, LocalStep
from fedsim import models
from fedsim.recording.masked_vectors import SUM
from fedsim.recording.observation import Observation, Training

__all__ = [
    "NOTHING", "Gradient", "Gradients", "Weights", "as_gradient", "buffers_of", "channel_of", "facts_of", "gradient_of",
    "network_of", "omitted_of", "schedule", "shares", "through", "total_step",
]  # fmt: skip


def network_of(observation: Observation) -> nn.Module:
    """The observed model as a simulation needs it: nothing in it is drawn, and nothing is written while it computes.

    Mode "eval": batch norm goes by the buffers that it is given. Mode "train": by the statistics of the guessed batch, and it
    has no buffers left. Dropout is off in both: no server knows what a client drew, and a search needs a loss that stays, so
    that where a client trained with dropout the simulated gradient is near the observed one even at the truth, not equal.
    So is a variational bottleneck: its noise is averaged out.
    """
    model = models.build(observation.model, observation.data).eval()
    if observation.training.mode == "train":
        replace_all_batch_norm_modules_(model)
    return model


def buffers_of(model: nn.Module, observations: Sequence[Observation]) -> tuple[dict[str, Tensor], bool]:
    """What to give a `network_of` for its buffers, by name, and whether all observations share it; if not, one row each.

    An observation without any is one of the model's own. Raises ValueError where only some are there.
    """
    own = {name: dict(model.named_buffers())[name] for name in models.buffer_names(model)}
    each = [_chosen(own, o.buffers) for o in observations]
    if all(all(torch.equal(b[name], each[0][name]) for name in own) for b in each[1:]):
        return each[0], True
    return {name: torch.stack([b[name] for b in each]) for name in own}, False


def _chosen(own: Weights, seen: Weights) -> dict[str, Tensor]:
    if missing := [name for name in own if seen and name not in seen]:
        raise ValueError(f"the observation's buffers lack {', '.join(missing)}")
    return {name: seen[name].to(tensor.device) if seen else tensor for name, tensor in own.items()}


def facts_of(observation: Observation, model: nn.Module) -> Facts:
    """What rules for gradients may ask of the training behind an update."""
    training, count = observation.training, observation.num_examples or observation.training.batch_size
    sizes = training.batch_sizes(count) or _even(count, training.steps or 1)
    exact = len(sizes) == 1 and not training.weight_decay and not observation.defenses.steps
    return Facts(model, [LocalStep(*step) for step in zip(sizes, shares(training, len(sizes)), strict=True)], exact)


def schedule(observation: Observation) -> tuple[tuple[int, ...], int]:
    """Sizes of the batches behind an update, and a client's local steps.

    Behind a sum is one batch, of all its clients' examples; they are taken to have trained alike.
    """
    count, training = observation.num_examples or 0, observation.training
    if observation.client == SUM:
        each = -(-count // max(1, len(observation.cohort)))
        return (count,), training.steps or len(training.batch_sizes(each) or (each,))
    sizes = training.batch_sizes(count) or (count,)
    return sizes, training.steps or len(sizes)


def _even(count: int, steps: int) -> tuple[int, ...]:
    return (max(1, round(count / steps)),) * steps


def channel_of(observation: Observation, model: nn.Module) -> Channel:
    """What an attacker who knows all of a client's defenses expects of an update, beside the rule for gradients itself."""
    own = [observation.gradient.build().channel(facts_of(observation, model)), observation.defenses.channel()]
    return compose(*(channel for channel in own if channel is not transparent))


def omitted_of(observation: Observation, model: nn.Module) -> frozenset[str]:
    """Names of tensors that such an attacker leaves out of the comparison, on both sides.

    They tell of chance, or mislead, or clients do not train them.
    """
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad or observation.training.is_frozen(name)}
    return hidden(model) | frozen | observation.gradient.build().omitted(facts_of(observation, model))


def total_step(training: Training, steps: int) -> float:
    """How much of one constant gradient `steps` local steps add up to: `steps * learning_rate` for plain SGD."""
    return sum(shares(training, steps))


def shares(training: Training, steps: int) -> list[float]:
    """How much of the gradient of each of `steps` local steps ends up in the update; the first goes on through momentum.

    Of Adam, the learning rates of the steps: its changes of each step are about that long.
    """
    rates, momentum = [training.rate(step) for step in range(steps)], training.momentum
    later = 0.0  # what the velocity of a step adds to the update by itself and in the steps after it
    found = []
    for rate in reversed(rates):
        found.append(rate + momentum * later if not training.nesterov else rate + momentum * (rate + momentum * later))
        later = found[-1] if not training.nesterov else rate + momentum * later
    return found[::-1]


def as_gradient(update: Mapping[str, Tensor], weights: Weights, training: Training, steps: int) -> Gradient:
    """The gradient that an update stands for, by name.

    Exact for one step. For more, all of them are taken as one batch at the weights that were sent (AGIC, eq. 4).
    """
    scale = total_step(training, steps)
    return {name: -u / scale - training.decay * weights[name] for name, u in update.items()}


def through(
    channel: Channel, known: ChannelFacts, gradient: Mapping[str, Tensor], weights: Weights, training: Training, steps: int
) -> Gradient:
    """The gradient that would be read off the update that `gradient` leads to, after the defense."""
    scale = total_step(training, steps)
    update = {name: -scale * (g + training.decay * weights[name]) for name, g in gradient.items()}
    return as_gradient(channel.expect(update, known), weights, training, steps)
