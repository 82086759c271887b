"""Functions that simulate a client as an observation describes it: network, batch sizes, defense, and updates as gradients."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import replace_all_batch_norm_modules_

from attacker.attacks.simulation.step_orders import MAX_ORDERED_EXAMPLES
from defenses.channel import Channel, ChannelFacts, ChannelState, compose_channels, transparent
from defenses.networks import StochasticModule, find_hidden
from defenses.rules import Gradient, LocalStep, TrainingContext, Weights
from fedsim import models
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.observation import Observation
from fedsim.recording.training import Training

MAX_SIMULATED_STEPS = 10
"""Largest number of local steps that are simulated by default. More leave too few iterations: on tuning images, with 20 steps, a
LeNet with sigmoids gained 4 dB, and a network with ReLU lost 6 dB."""


def build_network(observation: Observation) -> nn.Module:
    """Return the observed model, set up so that its forward pass writes no buffers and draws no dropout.

    If the client trained in mode "eval", batch norm uses the buffers that it is given. In mode "train" it uses the statistics of
    the candidate batch, and its buffers are removed. Dropout and the noise of a variational bottleneck are switched off in both
    modes, since the server does not know the client's random numbers. For a client that trained with dropout or such noise, the
    simulated gradient therefore differs from the observed one even at the true examples.
    """
    model = models.build(observation.model, observation.data).eval()
    if observation.training.mode == "train":
        replace_all_batch_norm_modules_(model)
    return model


def get_buffers(model: nn.Module, observations: Sequence[Observation]) -> tuple[dict[str, Tensor], bool]:
    """Return the buffers that clients were sent, by name, for a model of `build_network`, and whether all got equal ones.

    If the observations differ, each tensor has one row per observation. An observation without buffers gets those of `model`.
    Raises ValueError if an observation has some of the model's buffers but not all.
    """
    buffers = {name: dict(model.named_buffers())[name] for name in models.list_buffers(model)}
    each = [_choose_buffers(buffers, o) for o in observations]
    if all(all(torch.equal(b[name], each[0][name]) for name in buffers) for b in each[1:]):
        return each[0], True
    return {name: torch.stack([b[name] for b in each]) for name in buffers}, False


def _choose_buffers(model_buffers: Weights, observation: Observation) -> dict[str, Tensor]:
    seen = observation.buffers
    if missing := [name for name in model_buffers if seen and name not in seen]:
        raise ValueError(
            f"round {observation.round}, client {observation.client}: the recorded buffers lack {', '.join(missing)}; record all "
            "buffers of the model, or none"
        )
    return {name: seen[name].to(tensor.device) if seen else tensor for name, tensor in model_buffers.items()}


def build_facts(observation: Observation, model: nn.Module) -> TrainingContext:
    """Return the facts from which a gradient rule, such as DP-SGD, builds the attacker's model of the rule's effect.

    A gradient rule is the client's way to compute a gradient. The facts are the model, the (assumed) size of each local step and
    the factor of its gradient in the update, and whether zeros of the gradient arrive as zeros: true only for one step without
    weight decay and without a defense of the update.
    """
    training, count = observation.training, observation.num_examples or observation.training.batch_size
    steps = training.steps or 1
    sizes = training.count_step_examples(count) or (max(1, round(count / steps)),) * steps
    exact = len(sizes) == 1 and not training.weight_decay and not observation.defenses.steps
    return TrainingContext(
        model, [LocalStep(*step) for step in zip(sizes, compute_shares(training, len(sizes)), strict=True)], exact
    )


def find_schedule(observation: Observation) -> tuple[tuple[int, ...], int]:
    """Return the batch sizes that the attacker assumes, and the number of local steps.

    There is one size per step if the sizes follow from the number of examples. If they do not, and for a secure sum, all examples
    form one batch (of size 0 if their number is unknown), whatever the number of steps. The clients of a secure sum are assumed
    to have equally many examples and steps.
    """
    count, training = observation.num_examples or 0, observation.training
    if observation.client == SUM_CLIENT:
        each = -(-count // max(1, len(observation.cohort)))
        return (count,), training.steps or len(training.count_step_examples(each) or (each,))
    sizes = training.count_step_examples(count) or (count,)
    return sizes, training.steps or len(sizes)


def choose_simulated_steps(training: Training, examples: int) -> int:
    """Return the number of local steps of a client if they are to be simulated one by one, and otherwise 1.

    They are if each is on all examples of the client, so that the examples of each step are known, and if there are at most
    `MAX_SIMULATED_STEPS`. examples: number of examples; 0 if it is unknown.
    """
    if not 0 < examples <= training.step_size or (training.epochs or 0) > MAX_SIMULATED_STEPS:
        return 1
    sizes = training.count_step_examples(examples) or ()
    return len(sizes) if set(sizes) == {examples} and len(sizes) <= MAX_SIMULATED_STEPS else 1


def count_ordered_steps(training: Training, examples: int) -> int:
    """Return the number of local steps of a client if the order in which it used its examples can be searched for, else 1.

    It can if the batch size of each step is known, if there are at most `MAX_SIMULATED_STEPS`, some of them on a part of the
    examples only, and if the client has at most `MAX_ORDERED_EXAMPLES` examples and uses each once per epoch.
    examples: number of examples; 0 if it is unknown.
    """
    if not 0 < examples <= MAX_ORDERED_EXAMPLES or (training.epochs or 0) > MAX_SIMULATED_STEPS:
        return 1
    sizes = training.count_step_examples(examples) or ()
    is_ordered = len(sizes) <= MAX_SIMULATED_STEPS and sum(sizes) % examples == 0 and set(sizes) != {examples}
    return len(sizes) if sizes and is_ordered else 1


def build_channel(observation: Observation, model: nn.Module) -> Channel:
    """Return the channel (the attacker's model of what defenses do to an update) of an attacker that knows all defenses.

    Of the gradient rule by which clients compute gradients, such as DP-SGD, it includes only what the simulated gradient does not
    follow already (`GradientRule.channel`), such as its noise.
    """
    channels = [observation.gradient.build().channel(build_facts(observation, model)), observation.defenses.build_channel()]
    return compose_channels(*(channel for channel in channels if channel is not transparent))


def find_omitted(observation: Observation, model: nn.Module) -> frozenset[str]:
    """Return the names of parameters that an attacker leaves out when it compares gradients, if it knows the defenses.

    These are parameters that the defense makes random or misleading, and parameters that clients do not train.
    """
    frozen = find_frozen(model, observation.training)
    return find_hidden(model) | frozen | observation.gradient.build().omitted(build_facts(observation, model))


def find_frozen(model: nn.Module, training: Training) -> frozenset[str]:
    """Return the names of parameters that clients do not train."""
    return frozenset(name for name, p in model.named_parameters() if not p.requires_grad or training.is_frozen(name))


def sends_signs(observation: Observation) -> bool:
    """Return whether a declared defense leaves only the signs of an update, whose magnitudes then say nothing."""
    return any(step.name == "sign" for step in observation.defenses.steps)


def draws_at_random(observation: Observation, model: nn.Module) -> bool:
    """Return whether clients draw random numbers while they train that a simulation leaves out.

    These are masks of dropout, noise of a bottleneck, and mixtures of examples. The simulated gradient of the true examples then
    differs from the observed one.
    """
    stochastic = any(isinstance(module, StochasticModule) for module in model.modules())
    unsimulated = models.list_unsimulated(model, observation.training, observation.data)
    return stochastic or bool(unsimulated) or observation.inputs.step is not None


def compute_total_step(training: Training, steps: int) -> float:
    """Return the sum of `compute_shares`: for SGD, the factor of a constant gradient in the update of `steps` local steps.

    The sign of the factor is left out. The sum is `steps * learning_rate` for plain SGD at a constant rate, and for Adam the sum
    of learning rates.
    """
    return sum(compute_shares(training, steps))


def compute_shares(training: Training, steps: int) -> list[float]:
    """Return for each of `steps` local steps the factor with which its gradient enters the update, up to the sign.

    With momentum, a gradient acts in all later steps as well, so that at a constant rate earlier steps have larger factors. For
    Adam and AdamW, the learning rate of each step is returned, the approximate size of the step per coordinate.
    """
    rates, momentum = [training.compute_rate(step) for step in range(steps)], training.momentum
    later = 0.0  # contribution of a step's velocity to the update, in this step and all later ones
    shares = []
    for rate in reversed(rates):
        shares.append(rate + momentum * later if not training.nesterov else rate + momentum * (rate + momentum * later))
        later = shares[-1] if not training.nesterov else rate + momentum * later
    return shares[::-1]


def convert_to_gradient(update: Mapping[str, Tensor], weights: Weights, training: Training, steps: int) -> Gradient:
    """Return the gradient that explains an update, by parameter name: the update / -total step, without the weight decay.

    For one step of SGD without clipping of the gradient, this is the client's gradient. Several steps are treated as one step on
    one large batch at the weights sent (AGIC, eq. 4).
    steps: number of local steps. The total step is that of `compute_total_step`.
    """
    scale = -compute_total_step(training, steps)
    gradient = {name: u / scale for name, u in update.items()}
    return {name: g - training.decay * weights[name] for name, g in gradient.items()} if training.decay else gradient


def simulate_channel(
    channel: Channel,
    known: ChannelFacts,
    gradient: Mapping[str, Tensor],
    weights: Weights,
    training: Training,
    steps: int,
    *,
    approximate: bool = False,
) -> Gradient:
    """Return the gradient that the server is expected to compute by `convert_to_gradient` from a client's defended update.

    gradient: the client's gradient before its defense. channel: the attacker's model of the defense. known: what `channel.learn`
    returned for the received update. approximate: whether `gradient` treats several local steps as one.
    """
    update = _convert_to_update(gradient, weights, training, steps)
    expected = channel.expect_update(update, known, approximate=approximate)
    return convert_to_gradient(expected, weights, training, steps)


def follow_channel(
    channel: Channel,
    state: ChannelState,
    known: ChannelFacts,
    gradient: Mapping[str, Tensor],
    weights: Weights,
    training: Training,
    steps: int,
) -> tuple[Gradient, ChannelState]:
    """Return the gradient as `simulate_channel` does, for a client whose defense has a state, and the state after the round.

    state: the simulated state after the earlier rounds, on the scale of updates and not of gradients; empty in the first round.
    """
    update = _convert_to_update(gradient, weights, training, steps)
    expected, after = channel.follow_round(update, state, known)
    return convert_to_gradient(expected, weights, training, steps), after


def _convert_to_update(gradient: Mapping[str, Tensor], weights: Weights, training: Training, steps: int) -> dict[str, Tensor]:
    scale = -compute_total_step(training, steps)
    if training.decay:
        return {name: scale * (g + training.decay * weights[name]) for name, g in gradient.items()}
    return {name: scale * g for name, g in gradient.items()}
