"""The mean over examples of their clipped gradients, without a gradient of each example for large linear layers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from defenses.base import Update
from defenses.rules import Gradient, GradientProblem, Weights

PER_EXAMPLE_BYTES = 2**28
"""Approximate limit of memory for gradients of single examples that are computed at once."""
LARGE_LINEAR = 2**16
"""Number of entries from which on the weight of a linear layer counts as large."""
MAX_AT_ONCE = 64
"""Largest number of examples that are computed at once if large linear layers are factored."""

Clip = Callable[[Gradient], Update]
"""Scales the tensors of one example's gradient by factors that depend on their Euclidean norms only."""


class _NotFactored(Exception):
    """Error for a linear layer that is not called exactly once with one vector for each example."""


def compute_clipped_mean(clip: Clip, problem: GradientProblem, weights: Weights, x: Tensor, y: Tensor) -> tuple[Gradient, Tensor]:
    """Return the mean over examples of their clipped gradients, by parameter name, and the mean loss.

    The gradient of one example by the weight of a linear layer is the outer product of the derivative by the layer's output and
    of its input, and its norm is the product of their norms. For large layers only these vectors are computed for each example
    (Goodfellow 2015, "Efficient per-example gradient computations"), if the network calls the layer once with one vector.
    """
    large = _find_large_linears(problem.model, weights)
    if large:
        try:
            return _compute_factored(clip, problem, weights, x, y, large)
        except _NotFactored:
            pass
    return _compute_factored(clip, problem, weights, x, y, {})


def _find_large_linears(model: nn.Module, weights: Weights) -> dict[str, nn.Linear]:
    """Return the large linear layers of a network whose weights no other module uses, by the names of their weights."""
    found = {
        f"{name}.weight" if name else "weight": module for name, module in model.named_modules() if type(module) is nn.Linear
    }
    used = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    return {
        name: module
        for name, module in found.items()
        if name in weights and module.weight.numel() >= LARGE_LINEAR and used.count(id(module.weight)) == 1
    }


def _compute_factored(
    clip: Clip, problem: GradientProblem, weights: Weights, x: Tensor, y: Tensor, large: Mapping[str, nn.Linear]
) -> tuple[Gradient, Tensor]:
    """Return the result of `compute_clipped_mean`. large: layers whose gradients are factored, by the names of their weights.

    Raises _NotFactored if that is not possible.
    """
    small = {name: w for name, w in weights.items() if name not in large}
    zeros = {name: weights[name].new_zeros(1, len(weights[name])) for name in large}

    def compute_loss(own: Gradient, shifts: Gradient, x: Tensor, y: Tensor) -> tuple[Tensor, Gradient]:
        with _shift_outputs(large, shifts) as inputs:
            loss = problem.compute_loss({name: own.get(name, w) for name, w in weights.items()}, x, y)
        if len(inputs) < len(large):
            raise _NotFactored
        return loss, inputs

    def clip_one(x: Tensor, y: Tensor) -> tuple[Update, Gradient, Tensor]:
        """Return the clipped gradient of one example, in which the weight of a large layer has its derivative by the output.

        That derivative is scaled so that its norm is that of the gradient by the weight. The second dict has the inputs of these
        layers with norm 1.
        """
        evaluate = grad_and_value(compute_loss, argnums=(0, 1), has_aux=True)
        (gradient, slopes), (loss, inputs) = evaluate(small, zeros, x[None], y[None])
        norms = {name: (a.square().sum() + torch.finfo(a.dtype).tiny).sqrt() for name, a in inputs.items()}
        scaled = {name: slopes[name] * norms[name] for name in large}
        return clip({**gradient, **scaled}), {name: inputs[name] / norms[name] for name in large}, loss

    several = max(1, PER_EXAMPLE_BYTES // max(1, sum(w.numel() * w.element_size() for w in small.values())))
    several = min(several, MAX_AT_ONCE) if large else several
    total: Gradient = {}
    losses = []
    for part in zip(torch.split(x, several), torch.split(y, several), strict=True):
        clipped, inputs, loss = vmap(clip_one, randomness="different")(*part)
        for name in weights:
            of_part = clipped[name][:, 0].T @ inputs[name][:, 0] if name in large else clipped[name].sum(dim=0)
            total[name] = total[name] + of_part if name in total else of_part
        losses.append(loss)
    return {name: g / len(x) for name, g in total.items()}, torch.cat(losses).mean()


@contextmanager
def _shift_outputs(layers: Mapping[str, nn.Linear], shifts: Gradient) -> Iterator[Gradient]:
    """Add shifts (1, outputs) to the outputs of layers within a `with` statement, which yields a dict of their inputs (1, F).

    Raises _NotFactored if a layer is called twice, or with inputs of another shape.
    """
    inputs: Gradient = {}

    def build_hook(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def shift(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
            if name in inputs or output.shape != shifts[name].shape:
                raise _NotFactored
            inputs[name] = args[0]
            return output + shifts[name]

        return shift

    handles = [layer.register_forward_hook(build_hook(name)) for name, layer in layers.items()]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
