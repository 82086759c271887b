"""Labels and features of one observation, read off its gradient before any search."""

import torch
from torch import Generator, Tensor, nn

from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.probes import head_inputs, random_inputs
from attacker.attacks.labels.rules import Evidence, Head, LabelRule
from attacker.attacks.linking import HeadFeatures, head_features
from attacker.attacks.simulation.client import total_step
from fedsim import models

PROBES = 64
"""Random inputs of the attacker's own, to see what the model makes of anything."""
MISFIT = 0.5
"""Share of the head's gradient above which the features read off it do not explain it: they say nothing."""


def read_labels(rule: LabelRule, seen: ObservedGradients, i: int, model: nn.Module, rng: Generator) -> Tensor:
    """(N,) int64, what `rule` says of case i of a seen.

    The gradients behind an update of several local steps were taken on the way from the weights sent to those sent back: the
    model is looked at in the middle of them, unless a defense changed the update.
    """
    row = seen.state(i)
    gradient = {name: g[i] for name, g in seen.gradients.items()}
    weights = row["weights"]
    if seen.steps > 1 and not seen.defended:
        way = total_step(seen.training, seen.steps) * (seen.steps - 1) / (2 * seen.steps)
        weights = {name: w - way * (gradient[name] + seen.training.decay * w) for name, w in weights.items()}
    with torch.no_grad():
        probes = random_inputs(seen.data, PROBES, rng).to(seen.device)
        features, logits = head_inputs(model, {**row["buffers"], **weights}, seen.data.normalise(probes))
    weight, bias = models.head(model)
    head = Head(weights[weight], None if bias is None else weights[bias], features)
    guess = models.probabilities(logits).mean(dim=0)
    return rule(Evidence(gradient, weight, bias, seen.count, guess, seen.defended, head))


def read_features(seen: ObservedGradients, labels: Tensor, rng: Generator, *, known: bool) -> HeadFeatures:
    """Return what went into the last layer for each example of the only case, on the CPU. known: labels are no guess."""
    row, (weight, bias) = seen.state(0), models.head(seen.model)
    gradient = {name: g[0].cpu() for name, g in seen.gradients.items()}
    weights = {name: w.cpu() for name, w in row["weights"].items()}
    return head_features(
        gradient[weight],
        None if bias is None else gradient[bias],
        labels,
        weight=weights[weight],
        bias=None if bias is None else weights[bias],
        rng=rng,
        recount=not known and bias is not None,
    )
