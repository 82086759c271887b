"""Gradients of many problems that share weights, by one ordinary pass over all of their examples.

Examples meet in the loss only, where batch norm goes by its buffers: the batches of all problems run through the network as one.
What went into a layer and what came back to it then give the gradient of its weights for each problem by itself, by products of
matrices, where `vmap` of a gradient takes convolutions with one group a problem.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from attacker.attacks.gradients.convolutions import channels_last
from attacker.attacks.gradients.layer_gradients import Stack
from attacker.attacks.gradients.taps import Tap, Taps
from attacker.attacks.networks.forward import forward_pass
from attacker.attacks.simulation.gradients import NOTHING, Gradient, Weights, agree, gradient_of, probe, probed, squared
from fedsim import models
from fedsim.models.losses import Loss
from fedsim.recording.observation import DataSpec

StackedGradients = dict[str, Stack]


class PerProblem(Protocol):
    """From shared weights, x (P, N, *shape) in [0, 1], y (P, N) or soft (P, N, K), and shared buffers to the gradients.

    precision: of large convolutions; None for that of the weights. Gives dL/dw of each problem's own mean loss by name: a row of
    one tensor, or where these are large a tensor, for each problem. Differentiable by x and by soft y. Not to be called under
    `vmap` or `torch.func.grad`: problems are what it maps over.
    """

    def __call__(
        self, weights: Weights, x: Tensor, y: Tensor, buffers: Weights = NOTHING, precision: torch.dtype | None = None
    ) -> StackedGradients: ...


def apart(gradients: StackedGradients) -> list[Gradient]:
    """The gradient of each problem by itself."""
    rows = {name: g if isinstance(g, tuple) else g.unbind() for name, g in gradients.items()}
    return [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]


def together(gradients: StackedGradients) -> Gradient | None:
    """(P, *shape) of each parameter; None where one tensor would be too large for that."""
    return None if any(isinstance(g, tuple) for g in gradients.values()) else cast(Gradient, gradients)


@lru_cache(maxsize=2)
def per_problem(model: nn.Module, data: DataSpec, loss: str) -> PerProblem | None:
    """What `simulation.gradient_of` gives for one problem, for many at once.

    None where that cannot be had in this way: where a parameter goes into anything but linear layers, two-dimensional
    convolutions and batch norm that goes by its buffers, or where the examples of a batch act on each other. Tried once, on two
    problems of two examples each.
    """
    gradients = _untried(model, data, models.loss_of(loss))
    return gradients if _agrees(gradients, model, data, loss) else None


def _untried(model: nn.Module, data: DataSpec, measure: Loss) -> PerProblem:
    def gradients(
        weights: Weights, x: Tensor, y: Tensor, buffers: Weights = NOTHING, precision: torch.dtype | None = None
    ) -> StackedGradients:
        searched = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
        if len(x) == 1 and precision is None and sum(w.numel() for w in weights.values()) < LARGE:
            return _of_one(weights, x[0], y[0], buffers, searched)
        taps = Taps(weights, len(x), precision)
        with torch.enable_grad():
            fed = data.normalise((x if x.requires_grad else x.detach().requires_grad_()).flatten(0, 1))
            with taps:
                logits = forward_pass(model, {**buffers, **weights}, fed)
            total = len(x) * measure(logits, y.flatten(0, 1))
            edges = [tap.edge for tap in taps.found]
            outputs = torch.autograd.grad(total, edges, create_graph=searched, allow_unused=True)
        with torch.set_grad_enabled(searched):
            return _collected(weights, len(x), taps.found, outputs)

    def _of_one(weights: Weights, x: Tensor, y: Tensor, buffers: Weights, searched: bool) -> StackedGradients:
        """What torch does by itself: taps cost more than they bring where there is but one small problem."""
        with torch.enable_grad():
            own = {name: w.detach().requires_grad_() for name, w in weights.items()}
            total = measure(forward_pass(model, {**buffers, **own}, data.normalise(x)), y)
            found = torch.autograd.grad(total, list(own.values()), create_graph=searched, materialize_grads=True)
        return {name: g[None] for name, g in zip(own, found, strict=True)}

    return gradients


def _collected(weights: Weights, problems: int, taps: Sequence[Tap], outputs: Sequence[Tensor | None]) -> StackedGradients:
    """Sums over the calls of each layer; zeros for weights that the loss does not depend on."""
    found: StackedGradients = {}
    for tap, output in zip(taps, outputs, strict=True):
        if output is None:
            continue
        for name, rule in tap.rules.items():
            gradient = rule(output)
            found[name] = _sum(found[name], gradient) if name in found else gradient
    return {name: found[name] if name in found else w.new_zeros(problems, *w.shape) for name, w in weights.items()}


LARGE = 1e6
"""Values of all weights."""


def _sum(one: Stack, other: Stack) -> Stack:
    if isinstance(one, tuple) or isinstance(other, tuple):
        return tuple(a + b for a, b in zip(one, other, strict=True))
    return one + other


def _agrees(gradients: PerProblem, model: nn.Module, data: DataSpec, loss: str) -> bool:
    """Whether two problems of two examples have the gradients that each has by itself, and their squared lengths the slopes.

    Weights lie as they do in a search.
    """
    weights, buffers, x, y = probe(model, data)
    laid = {name: channels_last(w) for name, w in weights.items()}
    try:
        with torch.enable_grad():
            x = x.requires_grad_()
            found = {name: torch.stack(g) if isinstance(g, tuple) else g for name, g in gradients(laid, x, y, buffers).items()}
            (slope,) = torch.autograd.grad(squared(found), x)
            alone = gradients(laid, x[:1], y[:1], buffers)
    except (RuntimeError, ValueError, TypeError):  # whatever a model of others does that taps do not foresee
        return False
    expected = probed(gradient_of(model, data, loss), model, data, loop=True)
    first = {name: g[0] for name, g in alone.items()}, slope[0]
    return agree((found, slope), expected) and agree(first, ({name: g[0] for name, g in expected[0].items()}, expected[1][0]))
