"""Checks whether clients train as the recording states, and on data of the stated shape, since attacks rely on both."""

from collections.abc import Container, Iterator, Sequence

import torch

from attacker.attacks.simulation.client import find_schedule
from attacker.audit.findings import CheckResult, Finding, NotChecked, PassedCheck
from attacker.replay.example_counts import measure_least_examples
from fedsim import models
from fedsim.recording import DataSpec, Observation
from fedsim.recording.contradictions import find_contradictions

TRAINING_RULE, SHAPE_RULE = "training-misstated", "shape-misstated"
MAX_BIAS_EXCESS = 1.1
"""Largest change of the last layer's bias, relative to its bound, that is taken for possible. The excess allows for rounding."""
OTHER_LOSS = ", or minimise another loss, such as the squared error of a regression, which attacks do not simulate"
"""Further cause of a large change of the last layer's bias, if clients are said to train a single logit."""
MAX_RANKED = 8
"""Largest number of updates whose rank is compared with the number of examples."""


def check_shape(data: DataSpec) -> Iterator[Finding]:
    """Yield a `Finding` if the stated shape looks like images with channels last, which priors and pictures misread."""
    for doubt in data.list_doubts():
        yield Finding(
            rule=SHAPE_RULE,
            grade="low",
            title="The stated shape looks like images with channels last, of which attacks find less than they could.",
            evidence=f"{doubt[0].upper()}{doubt[1:]}.",
            advice="If the channels come last, correct the shape and record again.",
        )


def check_training(observations: Sequence[Observation]) -> CheckResult:
    """Return a `Finding` if the tensors in most updates contradict the stated training.

    See `find_contradictions`, `_judge_head` and, for the first MAX_RANKED updates, `_judge_examples`.

    Single updates may do so by chance, such as one whose example turns on no neuron of a layer. Only whole weights, as unchanged
    apps send them, are compared. Without any, the result is a `NotChecked`.
    """
    whole = [observation for observation in observations if observation.payload.codec == "weights"]
    if not whole:
        return NotChecked(rule=TRAINING_RULE, reason="no client sends whole weights, which could be compared with its training")
    unused = _list_unused(whole[0])
    wrong = [(observation, problem) for observation in whole if (problem := _list_contradictions(observation, unused))]
    if 2 * len(wrong) <= len(whole):
        ranked = whole[:MAX_RANKED]
        crowded = [(observation, problem) for observation in ranked if (problem := _judge_examples(observation))]
        if 2 * len(crowded) > len(ranked):
            return _make_finding(crowded, len(ranked))
        return PassedCheck(rule=TRAINING_RULE, evidence=f"{len(wrong)} of {len(whole)} updates contradict the stated training")
    return _make_finding(wrong, len(whole))


def _make_finding(wrong: Sequence[tuple[Observation, list[str]]], count: int) -> Finding:
    """Return the finding for updates with sentences on what contradicts the stated training. count: number of tested updates."""
    first, problem = wrong[0]
    return Finding(
        rule=TRAINING_RULE,
        grade="low",
        title="Clients do not train as stated, so that attacks simulate another training and find less than they could.",
        evidence=f"In {len(wrong)} of {count} updates; the first, round {first.round}, client {first.client}: "
        f"{'; '.join(problem)}.",
        advice="Correct the settings in record(), or what clients send, and record again: the results of attacks on this run "
        "show little.",
    )


def _list_contradictions(observation: Observation, unused: Container[str]) -> list[str]:
    """Return sentences on what the stated training cannot explain. unused: names of parameters that the network does not use."""
    before = {name: t for name, t in {**observation.weights, **observation.buffers}.items() if name not in unused}
    after = {**observation.payload.tensors, **observation.buffers_after}
    contradictions = find_contradictions(
        observation.training, observation.num_examples, before, after, is_defended=observation.is_defended
    )
    return contradictions or _judge_head(observation)


def _list_unused(observation: Observation) -> frozenset[str]:
    """Return the names of the parameters that the network's outputs do not depend on, which no training changes.

    The result is empty if the network cannot be built, or fails on random inputs.
    """
    try:
        network = models.build(observation.model, observation.data).eval().requires_grad_(True)
        x = torch.rand(2, *observation.data.shape, generator=torch.Generator().manual_seed(0))
        names, parameters = zip(*network.named_parameters(), strict=True)
        gradients = torch.autograd.grad(network(observation.data.normalise(x)).sum(), parameters, allow_unused=True)
    except (ValueError, RuntimeError, TypeError, IndexError):  # code of the user's, on inputs that it may refuse
        return frozenset()
    return frozenset(name for name, gradient in zip(names, gradients, strict=True) if gradient is None)


def _judge_head(observation: Observation) -> list[str]:
    """Return a list of one sentence if SGD as stated cannot change the last layer's bias as much as it changed, or an empty list.

    Each entry of the bias' gradient is a mean of errors p - y in [-1, 1], whatever the examples are, also with label smoothing
    and with weights of classes. For softmax cross-entropy, the positive errors of an example sum to at most 1, and so do the
    negative ones, so that the sum of all absolute values is at most 2. Momentum m multiplies the sum of a round's steps
    by at most 1 / (1 - m).
    """
    training = observation.training
    try:
        _, bias = models.find_head(models.build_layout(observation.model, observation.data), observation.data)
    except ValueError:
        return []
    if training.optimiser != "sgd" or observation.gradient.step or bias is None or bias not in observation.payload.tensors:
        return []
    if training.epochs is not None and observation.num_examples is None:  # the number of steps is unknown
        return []
    if not _is_added_to_outputs(observation, bias):
        return []
    steps, before = find_schedule(observation)[1], observation.weights[bias].double()
    change = (observation.payload.tensors[bias].double() - before).abs()
    whole = training.loss == "cross_entropy" and len(change) > 1
    largest, start = (float(t.sum() if whole else t.max()) for t in (change, before.abs()))
    rates = sum(training.compute_rate(step) for step in range(steps)) / (1 - training.momentum)
    rounded = float(observation.rounding[bias].double().sum()) if bias in observation.rounding else 0.0
    possible = rates * (1 + whole + training.weight_decay * (start + largest)) + rounded
    if largest <= MAX_BIAS_EXCESS * possible:
        return []
    return [
        f"the last layer's bias, {bias}, changed by {'' if whole else 'up to '}{largest:.2g}{' in all' * whole}, and {steps} "
        f"step{'s' * (steps != 1)} of SGD with a learning rate of {training.learning_rate:g} can change it by at most "
        f"{possible:.2g}: compare learning_rate and the number of steps, and whether clients take the mean of the loss over the "
        f"batch or add noise{OTHER_LOSS * (training.loss == 'logistic')}"
    ]


def _judge_examples(observation: Observation) -> list[str]:
    """Return a list of one sentence if more examples are behind the update than the stated training allows, or an empty list."""
    training, reported = observation.training, observation.num_examples
    if training.steps is not None:
        maximum = training.steps * training.step_size
        maximum = min(reported or maximum, maximum) if training.steps == 1 else maximum
    elif reported is not None:
        maximum = (training.epochs or 1) * reported
    else:
        return []
    minimum, layer = measure_least_examples(observation)
    if minimum <= maximum:
        return []
    amount = f"steps={training.steps}" if training.steps is not None else f"epochs={training.epochs}"
    return [
        f"the update of {layer} has the rank of at least {minimum} examples, and at most {maximum} follow from "
        f"batch_size={training.batch_size}, {amount} and the {reported or 'unknown'} examples that the client counts: compare "
        "batch_size and the number of steps or epochs, the number that clients report, and whether clients add noise, decay "
        "weights or keep momentum from one round to the next without saying so"
    ]


def _is_added_to_outputs(observation: Observation, bias: str) -> bool:
    """Return whether the network's outputs are the last layer's, so that its bias is added to them without a factor.

    False if the network scales them, as by a temperature, if it cannot be built, or if it fails on random inputs.
    """
    try:
        network = models.build(observation.model, observation.data).eval().requires_grad_(True)
        x = torch.rand(2, *observation.data.shape, generator=torch.Generator().manual_seed(0))
        outputs = network(observation.data.normalise(x)).sum()
        (slope,) = torch.autograd.grad(outputs, [dict(network.named_parameters())[bias]])
    except (KeyError, ValueError, RuntimeError, TypeError, IndexError):  # code of the user's, on inputs that it may refuse
        return False
    return bool(torch.allclose(slope, torch.full_like(slope, float(len(x)))))
