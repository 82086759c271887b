"""The observed gradients of a batch of cases, with the weights that the server sent and the attacker's model of the defense."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attacker.attacks.gradients.convolutions import to_channels_last
from attacker.attacks.simulation.client import (
    build_channel,
    compute_total_step,
    convert_to_gradient,
    find_omitted,
    find_schedule,
    get_buffers,
)
from defenses.channel import transparent
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.observation import Observation


class ObservedGradients:
    """The gradients recovered from one observation per case, stacked.

    The observations must agree in data, training settings and defense, which are read from the first one.
    gradients:       gradients by parameter name, (cases, *shape): the updates divided by minus the total learning rate of the
                     local steps, without the weight decay (`convert_to_gradient`).
    seen:            the updates themselves, by parameter name, (cases, *shape).
    weights, buffers: weights and buffers that the server sent, by name, with one row per case. If all cases have the same ones,
                     that is if `shared` (weights) or `same_buffers` (buffers) is set, there is no axis for cases.
    channel:         the attacker's model of how the defense changes an update; `transparent`, which changes nothing, if
                     `knows_defense` is false.
    omitted:         names of parameters whose gradients are not compared, such as those that the defense makes random
                     (`find_omitted`); empty if `knows_defense` is false.
    rule:            how clients compute a batch's gradient, for example by DP-SGD, as a `defenses.rules.GradientRule`; None if
                     `knows_defense` is false.
    own_rule:        whether the attacker knows that clients compute gradients by another rule than the plain gradient.
    sizes, steps:    batch sizes and number of local steps that the attacker assumes (`find_schedule`).
    count:           number of examples; 0 if the client of the first observation reported none.
    defended:        whether a defense that the attacker knows changes the gradient or the update.
    variance:        variance of the defense's known noise per coordinate of the gradient, averaged over all coordinates,
                     (cases,); 0 if `knows_defense` is false. If an observation is the sum of several clients' updates (secure
                     aggregation), it is the variance in the mean of these updates.
    """

    def __init__(self, observations: Sequence[Observation], *, model: nn.Module, device: str, knows_defense: bool = True) -> None:
        first = observations[0]
        self.model, self.device, self.data, self.training = model, device, first.data, first.training
        self.sizes, self.steps = find_schedule(first)
        self.count = first.num_examples or 0
        self.channel = build_channel(first, model) if knows_defense else transparent
        self.omitted = find_omitted(first, model) if knows_defense else frozenset[str]()
        self.rule = first.gradient.build() if knows_defense else None
        self.own_rule = knows_defense and first.gradient.step is not None
        self.defended = self.channel is not transparent or self.own_rule
        order = dict(model.named_parameters())
        weights = [{name: o.weights[name].to(device) for name in order} for o in observations]
        self.shared = all(w[k] is t or torch.equal(w[k], t) for w in weights[1:] for k, t in weights[0].items())
        shared_weights = {name: to_channels_last(w) for name, w in weights[0].items()}
        self.weights = shared_weights if self.shared else {name: torch.stack([w[name] for w in weights]) for name in order}
        self.buffers, self.same_buffers = get_buffers(model, observations)
        updates = [{name: o.update[name].to(device) for name in order} for o in observations]
        gradients = [convert_to_gradient(u, w, self.training, self.steps) for u, w in zip(updates, weights, strict=True)]
        self.gradients = {name: _stack([g[name] for g in gradients]) for name in order}
        self.seen = {name: _stack([u[name] for u in updates]) for name in order}
        self.variance = self._estimate_variance(observations)

    def get_state(self, i: int) -> dict[str, dict[str, Tensor]]:
        """Return a dict with the keys "weights" and "buffers", each a dict from name to tensor of case i."""
        weights = self.weights if self.shared else {name: w[i] for name, w in self.weights.items()}
        buffers = self.buffers if self.same_buffers else {name: b[i] for name, b in self.buffers.items()}
        return {"weights": weights, "buffers": buffers}

    def _estimate_variance(self, observations: Sequence[Observation]) -> Tensor:
        parties = torch.tensor([len(o.cohort) if o.client == SUM_CLIENT else 1 for o in observations], device=self.device)
        noise = torch.func.vmap(self.channel.noise)(self.seen)
        each = noise / compute_total_step(self.training, self.steps) ** 2 / parties.clamp(min=1)
        return each / sum(s[0].numel() for s in self.seen.values())


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return `torch.stack(tensors)`; a single tensor, which may be large, is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))
