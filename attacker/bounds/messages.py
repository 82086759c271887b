"""The messages of clients as functions of their examples, with the noise that hides them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Generator, Tensor, nn

from attacker.attacks.simulation.client import build_facts, build_network, find_omitted, get_buffers
from attacker.attacks.simulation.gradients import build_gradient
from attacker.attacks.simulation.local_steps import LocalOptimiser
from attacker.bounds.information import NoisyMessage
from defenses.base import Update
from defenses.registry.calls import Step
from defenses.spec import DefenseSpec
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.observation import Observation

CLIPS, SELECTIONS = ("clip", "clip_each"), ("top_k", "prune")
NOISES = {"gaussian": "std", "laplace": "scale"}
RULES = ("dp_sgd", "fed_cdp")
"""Gradient rules whose noise is known; other rules are not bounded."""
ROUNDING = 2.0**-24
"""Half the relative distance of two neighbouring float32 numbers. Times the largest absolute value of a tensor, it is taken as
the standard deviation of the rounding of a message without noise."""


class NotBounded(ValueError):
    """Error for a message for which no lower bound on the reconstruction error is known. The error's text is the reason."""


@dataclass(frozen=True)
class UsedExamples:
    """An observed update, and for each of its local steps the indices of the examples used, as rows of x in `build_message`."""

    observation: Observation
    steps: tuple[tuple[int, ...], ...]

    @classmethod
    def select(cls, observation: Observation, steps: Sequence[Sequence[int]], indices: Sequence[int]) -> Self:
        """Return the use of a data set's examples, of which x holds those at `indices`. The client's own count is not trusted.

        steps: for each local step, indices into the data set; all of them are in `indices`.
        """
        row = {index: i for i, index in enumerate(indices)}
        rows = tuple(tuple(row[index] for index in step) for step in steps)
        return cls(replace(observation, num_examples=len({i for step in rows for i in step})), rows)


def build_message(used: UsedExamples, y: Tensor) -> NoisyMessage:
    """Return the update as a function of examples x (N, *shape), in float64, with the size of its noise, see `NoisyMessage`.

    Parameters that attackers leave out (`find_omitted`) are not part of the message.
    y: labels (N,). What follows the noise in a chain of defenses is left out, since it cannot add information. If no step adds
    noise, the rounding of the update to float32 is taken as its noise. Top-k and pruning select coordinates of the update at each
    x, but the derivative treats the selection as constant: the bound does not count the information in the choice of
    coordinates. Raises NotBounded for a defense whose bound is not known, for secure sums, if clients change their inputs, and
    for a gradient rule that is not one of `RULES` or is used in several local steps.
    """
    seen = used.observation
    if seen.client == SUM_CLIENT:
        raise NotBounded("no lower bound on the reconstruction error is known for sums under secure aggregation")
    if seen.inputs.step is not None:
        raise NotBounded(
            "no lower bound on the reconstruction error is known if clients change their inputs before training "
            "(MixUp, InstaHide)"
        )
    rule_std = _find_rule_noise(used)
    model = build_network(seen).double()
    weights = {name: w.double() for name, w in seen.weights.items() if name in dict(model.named_parameters())}
    buffers = {name: b.double() if b.is_floating_point() else b for name, b in get_buffers(model, [seen])[0].items()}
    gradient = build_gradient(model, seen.data, seen.training.loss, seen.gradient.build())
    names = _list_compared(seen, model)

    def train(x: Tensor) -> Update:
        optimiser, at = LocalOptimiser(seen.training), weights
        for step in used.steps:
            change = optimiser.step(gradient(at, x[list(step)], y[list(step)], buffers), at)
            at = {name: w + change[name] for name, w in at.items()}
        return {name: at[name] - weights[name] for name in names}

    chain = [] if rule_std else _list_until_noise(seen.defenses)
    added = next((_get_scale(step) for step in chain if step.name in NOISES), rule_std)
    sizes = {name: weights[name].numel() for name in names}
    if added:
        std = torch.tensor(added, dtype=torch.float64)
    else:
        scales = {name: float(seen.update[name].abs().max()) * ROUNDING for name in names}
        std = torch.cat([torch.full((sizes[name],), max(scales[name], 1e-30), dtype=torch.float64) for name in names])

    def simulate(x: Tensor) -> Tensor:
        update = train(x)
        for step in chain:
            update = _apply(step, update)
        return torch.cat([update[name].flatten() for name in names])

    return NoisyMessage(simulate, std)


def flatten_update(observation: Observation) -> Tensor:
    """Return the received update as one vector (M,) in float64, with the parameters and the order of `build_message`."""
    return torch.cat(
        [observation.update[name].double().flatten() for name in _list_compared(observation, build_network(observation))]
    )


def _list_compared(observation: Observation, model: nn.Module) -> list[str]:
    omitted, trained = find_omitted(observation, model), dict(model.named_parameters())
    return [name for name in observation.weights if name in trained and name not in omitted]


def _find_rule_noise(used: UsedExamples) -> float:
    """Return the standard deviation of the gradient rule's noise in the update, a root mean square over coordinates; 0 if none.

    A gradient rule replaces the usual computation of a batch's gradient on the client by another one, such as DP-SGD.
    Raises NotBounded if the clients use a rule that is not one of `RULES`, or any rule and several local steps.
    """
    seen, step = used.observation, used.observation.gradient.step
    if step is None:
        return 0.0
    if step.name not in RULES:
        raise NotBounded(
            f"no lower bound on the reconstruction error is known for clients that compute gradients with gradient={step.name}"
        )
    if len(used.steps) > 1:
        raise NotBounded(
            "no lower bound on the reconstruction error is known for clients that compute gradients with "
            f"gradient={step.name} in several local steps"
        )
    channel = seen.gradient.build().channel(build_facts(seen, build_network(seen)))
    return float((channel.noise(seen.update) / sum(u.numel() for u in seen.update.values())).sqrt())


def _list_until_noise(spec: DefenseSpec) -> list[Step]:
    """Return the steps of a chain up to and including the first that adds noise; all steps if none adds noise.

    Raises NotBounded if no lower bound on the error is known for one of these steps, or if the noise is 0 or depends on the data.
    """
    steps = []
    for step in spec.steps:
        if step.name not in (*CLIPS, *SELECTIONS, *NOISES) or dict(step.arguments).get("error_feedback"):
            raise NotBounded(f"no lower bound on the reconstruction error is known for the defense {step.name}")
        steps.append(step)
        if step.name in NOISES:
            _get_scale(step)
            break
    return steps


def _get_scale(step: Step) -> float:
    scale = dict(step.arguments).get(NOISES[step.name])
    if not isinstance(scale, int | float) or scale <= 0:
        raise NotBounded(
            f"no lower bound on the reconstruction error is known for the defense {step.name}, because its noise is 0 or depends "
            "on the data"
        )
    return float(scale)


def _apply(step: Step, update: Update) -> Mapping[str, Tensor]:
    """Apply one step of a defense differentiably, and return the update; a step that only adds noise returns it unchanged."""
    if step.name in NOISES:
        return update
    defense = DefenseSpec((step,)).build()
    state = defense.init(update)
    if step.name in CLIPS:
        return defense.apply(update, state, Generator())[0]
    kept, _ = defense.apply({name: u.detach() for name, u in update.items()}, state, Generator())
    return {name: u * (kept[name] != 0) for name, u in update.items()}
