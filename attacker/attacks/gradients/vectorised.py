"""Gradients of P problems that share weights, computed by one call for the examples of all problems.

A problem is one search, with a batch of its own. In most networks examples interact only in the loss, so that the batches of all
problems can be concatenated. The weight gradients of each problem then follow from each layer's inputs and output gradients by
matrix products, after one forward and backward pass. This is faster than `vmap` of a gradient, which runs convolutions with one
group per problem.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from attacker.attacks.gradients.convolutions import to_channels_last
from attacker.attacks.gradients.layer_calls import LayerCall, LayerCallRecorder
from attacker.attacks.gradients.layer_gradients import Stack
from attacker.attacks.networks.forward import run_forward_pass
from attacker.attacks.simulation.gradients import (
    NO_BUFFERS,
    build_gradient,
    draw_test_problems,
    evaluate_test_problems,
    explain_vmap_failure,
    is_close,
    squared_norm,
)
from defenses.rules import Gradient, Weights
from fedsim import models
from fedsim.models.losses import Loss
from fedsim.recording.observation import DataSpec

StackedGradients = dict[str, Stack]


class PerProblem(Protocol):
    """Protocol of a function that returns the gradients dL/dw of the mean losses of P problems, by parameter name.

    weights, buffers: shared by all problems, by name. x: examples (P, N, *shape) on the scale [0, 1], not normalised.
    y: labels (P, N), or soft labels (P, N, K).
    precision: data type for large convolutions, for functions that support one; None for the data type of the weights.

    Each value of the returned mapping is one tensor with a row per problem, or a tuple of P tensors. The values can be
    differentiated by x and by soft labels. Do not call the function under `vmap` or `torch.func.grad`: it handles all problems
    itself.
    """

    def __call__(
        self, weights: Weights, x: Tensor, y: Tensor, buffers: Weights = NO_BUFFERS, precision: torch.dtype | None = None
    ) -> StackedGradients: ...


def split_problems(gradients: StackedGradients) -> list[Gradient]:
    """Split the gradients of P problems into a list of P gradients, each a dict from parameter name to tensor."""
    rows = {name: g if isinstance(g, tuple) else g.unbind() for name, g in gradients.items()}
    return [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]


def join_problems(gradients: StackedGradients) -> Gradient | None:
    """Return the gradients unchanged if each value is one tensor (P, *shape); None if a value is a tuple of P tensors."""
    return None if any(isinstance(g, tuple) for g in gradients.values()) else cast(Gradient, gradients)


@lru_cache(maxsize=2)
def build_per_problem(model: nn.Module, data: DataSpec, loss: str) -> PerProblem | None:
    """Return a function for the gradients of P problems; None if the caller should use `vmap` of a single gradient instead.

    If parameters are used only by linear layers, 2D convolutions and batch norm with running statistics, and examples do not
    interact, the function makes one pass for all problems. Whether that is so is tested on two problems of two examples each.
    Otherwise, if torch.func cannot transform the network or it has more than MAX_VMAP_WEIGHTS weights, the function computes one
    problem after the other, by autograd alone. If neither applies, the result is None.
    """
    gradients = _build_unchecked(model, data, models.find_loss(loss))
    if not _has_other_weights(model, data) and _is_consistent(gradients, model, data, loss):
        return gradients
    return _build_one_by_one(model, data, models.find_loss(loss)) if explain_vmap_failure(model, data, loss) else None


def _build_one_by_one(model: nn.Module, data: DataSpec, measure: Loss) -> PerProblem:
    """Return a gradient function that computes one problem after the other by autograd; it ignores `precision`."""

    def compute_gradients(
        weights: Weights, x: Tensor, y: Tensor, buffers: Weights = NO_BUFFERS, precision: torch.dtype | None = None
    ) -> StackedGradients:
        searched = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
        laid = {name: w.contiguous() for name, w in weights.items()}
        gradients = []
        for examples, labels in zip(x, y, strict=True):
            buffer_copies = {name: b.clone() for name, b in buffers.items()}  # a network may write to them
            gradients.append(
                _compute_by_autograd(model, data, measure, (laid, buffer_copies), (examples.contiguous(), labels), searched)
            )
        return {name: tuple(gradient[name] for gradient in gradients) for name in weights}

    return compute_gradients


def _compute_by_autograd(
    model: nn.Module, data: DataSpec, measure: Loss, state: tuple[Weights, Weights], batch: tuple[Tensor, Tensor], searched: bool
) -> Gradient:
    """Return the gradient of one problem's mean loss, by autograd, as a dict from parameter name to tensor.

    state: weights and buffers. batch: examples (N, *shape) and labels. searched: whether the gradient must be differentiable by
    the batch.
    """
    (weights, buffers), (x, y) = state, batch
    with torch.enable_grad():
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        loss = measure(run_forward_pass(model, {**buffers, **leaves}, data.normalise(x)), y)
        gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=searched, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def _build_unchecked(model: nn.Module, data: DataSpec, measure: Loss) -> PerProblem:
    def compute_gradients(
        weights: Weights, x: Tensor, y: Tensor, buffers: Weights = NO_BUFFERS, precision: torch.dtype | None = None
    ) -> StackedGradients:
        searched = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
        if len(x) == 1 and precision is None and sum(w.numel() for w in weights.values()) < MAX_AUTOGRAD_WEIGHTS:
            single = _compute_by_autograd(model, data, measure, (weights, buffers), (x[0], y[0]), searched)
            return {name: g[None] for name, g in single.items()}  # recording calls takes longer
        recorder = LayerCallRecorder(weights, len(x), precision)
        with torch.enable_grad():
            inputs = data.normalise((x if x.requires_grad else x.detach().requires_grad_()).flatten(0, 1))
            with recorder:
                logits = run_forward_pass(model, {**buffers, **weights}, inputs)
            total = len(x) * measure(logits, y.flatten(0, 1))
            edges = [call.edge for call in recorder.calls]
            outputs = torch.autograd.grad(total, edges, create_graph=searched, allow_unused=True)
        with torch.set_grad_enabled(searched):
            return _collect_gradients(weights, len(x), recorder.calls, outputs)

    return compute_gradients


def _collect_gradients(
    weights: Weights, problems: int, calls: Sequence[LayerCall], outputs: Sequence[Tensor | None]
) -> StackedGradients:
    """Return the gradient of each weight, summed over the recorded layer calls that use it; zeros if the loss depends on none.

    outputs: for each call, the derivative of the loss by the layer's output; None if the loss does not depend on it.
    """
    totals: StackedGradients = {}
    for call, output in zip(calls, outputs, strict=True):
        if output is None:
            continue
        for name, rule in call.rules.items():
            gradient = rule(output)
            totals[name] = _add(totals[name], gradient) if name in totals else gradient
    return {name: totals[name] if name in totals else w.new_zeros(problems, *w.shape) for name, w in weights.items()}


MAX_AUTOGRAD_WEIGHTS = 1e6
"""Number of weights below which the gradient of a single problem is computed by autograd alone."""


def _add(first: Stack, other: Stack) -> Stack:
    if isinstance(first, tuple) or isinstance(other, tuple):
        return tuple(a + b for a, b in zip(first, other, strict=True))
    return first + other


def _has_other_weights(model: nn.Module, data: DataSpec) -> bool:
    """Return whether the logits depend on weights that no recorded layer call uses, such as those of layer norm.

    True as well if the test fails with an error. The test takes one forward pass, while `_is_consistent` compares all gradients.
    """
    weights = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    recorder = LayerCallRecorder(weights, 1)
    x = torch.zeros(2, *data.shape, device=next(iter(weights.values())).device, requires_grad=True)
    try:
        with torch.enable_grad(), recorder:
            total = run_forward_pass(model, {**dict(model.named_buffers()), **weights}, data.normalise(x)).sum()
            recorded = {name for call in recorder.calls for name in call.rules}
            others = [w for name, w in weights.items() if name not in recorded]
            return bool(others) and any(g is not None for g in torch.autograd.grad(total, others, allow_unused=True))
    except (RuntimeError, ValueError, TypeError):  # as in `_is_consistent`
        return True


def _is_consistent(gradients: PerProblem, model: nn.Module, data: DataSpec, loss: str) -> bool:
    """Return whether the gradients agree with those that `build_gradient` computes for each problem alone.

    The gradients and the derivatives of their squared norm by x are compared on the problems of `draw_test_problems`, for both
    problems together and for the first alone. False as well if the test fails with an error.
    """
    weights, buffers, x, y = draw_test_problems(model, data)
    laid = {name: to_channels_last(w) for name, w in weights.items()}
    try:
        with torch.enable_grad():
            x = x.requires_grad_()
            stacked = {name: torch.stack(g) if isinstance(g, tuple) else g for name, g in gradients(laid, x, y, buffers).items()}
            (slope,) = torch.autograd.grad(squared_norm(stacked), x)
            single = gradients(laid, x[:1], y[:1], buffers)
    except (RuntimeError, ValueError, TypeError):  # a user's model may do what the recorder does not support
        return False
    expected = evaluate_test_problems(build_gradient(model, data, loss), model, data, loop=True)
    first = {name: g[0] for name, g in single.items()}, slope[0]
    return is_close((stacked, slope), expected) and is_close(
        first, ({name: g[0] for name, g in expected[0].items()}, expected[1][0])
    )
