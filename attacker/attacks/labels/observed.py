"""The labels of an observation, and the features (inputs of the last layer) of its examples, inferred from its gradient."""

import torch
from torch import Generator, Tensor, nn

from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.gradients.products import GradientTensors
from attacker.attacks.labels.counts import solve_bias_gradient
from attacker.attacks.labels.probes import compute_head_inputs, draw_inputs
from attacker.attacks.labels.rules import Evidence, Head, LabelRule, infer_labels
from attacker.attacks.labels.step_labels import InferredOrder, can_infer_order, infer_step_order
from attacker.attacks.linking import HeadFeatures, solve_head_features
from attacker.attacks.simulation.client import compute_total_step
from defenses.networks import Bottleneck, draw_at_random
from fedsim import models

PROBE_COUNT = 64
"""Number of random inputs with which the attacker measures typical features and predictions of the model."""
MAX_MISFIT = 0.5
"""Largest distance between the last layer's gradient and the gradient that inferred features give, relative to the norm of the
last layer's gradient, at which these features are used."""


def read_labels(
    rule: LabelRule, observed: ObservedGradients, i: int, model: nn.Module, rng: Generator, *, simulated: bool = True
) -> Tensor:
    """Return the labels (N,), int64, that a label rule infers for case i of the stacked cases `observed`.

    Labels that `infer_labels` infers from several local steps are those of `read_order` if that is not None. simulated: whether
    `read_order` is tried.
    """
    if simulated and rule is infer_labels:
        found = read_order(rule, observed, i, model, rng)
        if found is not None:
            return torch.tensor(found.order.labels, device=observed.device).sort().values
    return _apply_rule(rule, observed, i, model, rng)


def read_order(
    rule: LabelRule, observed: ObservedGradients, i: int, model: nn.Module, rng: Generator, known: Tensor | None = None
) -> InferredOrder | None:
    """Return the order in which the client of case i used its examples, and their labels; None if it cannot be inferred.

    known: labels (N,) that are kept. If it is None, they are inferred: those of the rule are kept unless it is `infer_labels`.
    """
    if not can_infer_order(observed):
        return None
    labels = _apply_rule(rule, observed, i, model, rng) if known is None else known
    return infer_step_order(observed, i, labels, rng, known=known is not None or rule is not infer_labels)


def _apply_rule(rule: LabelRule, observed: ObservedGradients, i: int, model: nn.Module, rng: Generator) -> Tensor:
    """Return the labels (N,) that a rule infers.

    The rule gets the model's features and mean predictions for random inputs, at the weights that were sent. With several local
    steps and no known defense, they are computed at the mean of the weights at which the steps begin instead. This mean is
    estimated under the assumption that all steps are equal, so that the weights move in a straight line.
    """
    row = observed.get_state(i)
    gradient = {name: g[i] for name, g in observed.gradients.items()}
    weights = row["weights"]
    if observed.steps > 1 and not observed.defended:
        step_length = compute_total_step(observed.training, observed.steps) * (observed.steps - 1) / (2 * observed.steps)
        weights = {name: w - step_length * (gradient[name] + observed.training.decay * w) for name, w in weights.items()}
    with torch.no_grad(), draw_at_random(model, rng):
        probes = draw_inputs(observed.data, PROBE_COUNT, rng).to(observed.device)
        features, logits = compute_head_inputs(
            model, observed.data, {**row["buffers"], **weights}, observed.data.normalise(probes)
        )
    weight, bias = models.find_head(model, observed.data)
    head = Head(weights[weight], None if bias is None else weights[bias], features)
    mean_probabilities = models.predict_probabilities(logits).mean(dim=0)
    slope = None if bias is not None else _find_input_slope(model, head.weight, gradient)
    if slope is not None:
        bias = f"{weight}.bias"
        gradient[bias] = solve_bias_gradient(slope, head.weight, mean_probabilities)
    return rule(Evidence(gradient, weight, bias, observed.count, mean_probabilities, observed.defended, head))


def _find_input_slope(model: nn.Module, weight: Tensor, gradient: GradientTensors) -> Tensor | None:
    """Return the loss's derivatives by the head's inputs (F,), summed over the examples; None if they are not known.

    They are the gradient of the bias of the decoder in PRECODE's block, whose outputs are the inputs of the head.
    weight: of the head, (K, F). gradient: observed, by parameter name; a gradient of zeros counts as not sent, and one that is
    infinite or NaN is not used.
    """
    blocks = [name for name, module in model.named_modules() if isinstance(module, Bottleneck)]
    slopes = [gradient[f"{name}.decoder.bias"] for name in blocks if f"{name}.decoder.bias" in gradient]
    return next((s for s in slopes if len(s) == weight.shape[1] and s.any() and s.isfinite().all()), None)


def read_features(observed: ObservedGradients, labels: Tensor, rng: Generator, *, known: bool, i: int = 0) -> HeadFeatures:
    """Return the features (inputs of the last layer) and the label of each example, inferred from that layer's gradient.

    The result is on the CPU.
    observed: gradients of one or more cases. i: index of the case.
    labels: (N,), known or inferred, on the CPU.
    known:  whether `labels` are certain. If not, and if the layer has a bias, they are replaced if other labels are found that
            fit the gradient better.
    """
    row, (weight, bias) = observed.get_state(i), models.find_head(observed.model, observed.data)
    gradient = {name: g[i].cpu() for name, g in observed.gradients.items()}
    weights = {name: w.cpu() for name, w in row["weights"].items()}
    return solve_head_features(
        gradient[weight],
        None if bias is None else gradient[bias],
        labels,
        weight=weights[weight],
        bias=None if bias is None else weights[bias],
        rng=rng,
        recount=not known and bias is not None,
    )
