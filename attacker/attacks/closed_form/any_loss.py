"""The check of an answer against an observed gradient of clients whose loss is not known."""

import torch
from torch import Tensor

from attacker.attacks.closed_form.observations import StackedObservations
from attacker.attacks.networks.forward import record_calls, run_forward_pass
from defenses.channel import transparent
from fedsim import models

MAX_ERROR_SUM = 1e-2
"""Largest sum of an example's errors at the outputs, relative to the sum of their magnitudes, that counts as zero."""
MIN_SECOND_LABEL = 0.1
"""Smallest ratio of the second lowest to the lowest error of an example that shows a second label."""
NO_MATCH = 1e30
"""Distance of examples that no loss explains."""


def can_measure_any_loss(observed: StackedObservations) -> bool:
    """Return whether `measure_any_loss` applies: clients take one step of SGD, and no defense is known."""
    plain = observed.cases[0].observations[0].gradient.step is None and observed.channel is transparent
    return observed.steps == 1 and observed.training.optimiser == "sgd" and plain


def measure_any_loss(observed: StackedObservations, i: int, x: Tensor) -> float:
    """Return the distance of the observed gradient of case i from the nearest gradient of the examples with any loss.

    The loss decides only the errors, that is the gradient of each example's loss at the outputs of the last linear layer. They
    are computed from the gradient of this layer's weight and bias by least squares. The distance is as in
    `StackedObservations.measure_distance`. It is `NO_MATCH` if the network has no last linear layer that clients train and whose
    inputs are vectors, or if the errors of an example are those of two labels (`_are_mixed`).
    x: (B, *shape) in [0, 1].
    """
    try:
        weight, bias = models.find_head(observed.model, observed.data)
    except ValueError:
        return NO_MATCH
    weights = {name: w.clone().requires_grad_() for name, w in observed.get_weights(i).items()}
    head = weight.rpartition(".")[0]
    with record_calls({head: observed.model.get_submodule(head)}) as calls_by_layer:
        examples = observed.data.normalise(x.to(observed.device, observed.dtype))
        run_forward_pass(observed.model, {**weights, **observed.get_buffers(i)}, examples)
    calls = calls_by_layer.get(head, [])
    if weight in observed.omitted or len(calls) != 1 or calls[0][0].ndim != 2:
        return NO_MATCH
    inputs, outputs = calls[0][0].detach(), calls[0][1]
    head_gradient = observed.gradient[weight][i]
    if bias is not None and bias not in observed.omitted:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        head_gradient = torch.cat([head_gradient, observed.gradient[bias][i][:, None]], dim=1)
    errors = torch.linalg.pinv(inputs.T) @ head_gradient.T
    if _are_mixed(errors):
        return NO_MATCH
    gradient = torch.autograd.grad((errors * outputs).sum(), list(weights.values()), materialize_grads=True)
    return observed.measure_distance(i, dict(zip(weights, gradient, strict=True)))


def _are_mixed(errors: Tensor) -> bool:
    """Return whether some errors (B, K) are those of two labels, as of inputs that MixUp or CutMix made of two examples.

    Errors of softmax cross-entropy sum to zero, also with weights of classes or label smoothing, and only that of the label is
    far below zero. Errors of other losses, whose sum is not zero, are not judged.
    """
    sums_to_zero = errors.sum(dim=1).abs() <= MAX_ERROR_SUM * errors.abs().sum(dim=1)
    lowest = errors.sort(dim=1).values.clamp(max=0)
    return bool((sums_to_zero[:, None] & (lowest[:, 1:2] < MIN_SECOND_LABEL * lowest[:, :1])).any())
