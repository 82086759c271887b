"""Assembly and scaling of equations for a network's input, where one layer has too few equations to be solved on its own.

R-GAP, which solves for the input of each layer from the last to the first, has then solved the layers behind that one.
"""

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from attacker.attacks.closed_form.peeling.equations import ComposedEquations
from attacker.attacks.closed_form.rgap.footprint import find_used_values
from attacker.attacks.closed_form.rgap.recursion import Point, build_equations, compute_offset, invert_lengths
from attacker.attacks.closed_form.rgap.system import EquationValues, broadcast_like, unfold
from attacker.attacks.networks.chain import Chain
from attacker.attacks.networks.layers import Layer
from defenses.base import Tensors


def compose(chain: Chain, weights: Tensors, gradient: Tensors, point: Point, low: Tensor, high: Tensor) -> ComposedEquations:
    """Return the equations, which are not linear, of layer `point.at` and the layers before it for the network's input.

    point: the outputs of layer `point.at` and the loss gradient there, as R-GAP solved for them, for N problems (observations).
    weights: by name, (1 or N, *shape). gradient: by name, (N, *shape). low, high: normalised inputs for values of 0 and of 1.
    """
    system, target = build_equations(chain, weights, gradient, point)
    layers = chain.layers[: point.at + 1]
    lengths = system.compute_norms()
    used = find_used_values(chain)[point.at + 1].to(target.weights.device)
    system.scale = EquationValues(used * invert_lengths(lengths.weights), invert_lengths(lengths.gradients))
    below = layers[:-1]
    flat = tuple(gradient[layer.weight].reshape(len(system.k), layer.shape[0], -1) for layer in below)
    problem = ComposedEquations(
        layers=layers,
        system=system,
        target=target,
        known=layers[-1].activation.known(point.f.reshape(target.weights.shape)) > 0,
        weights=tuple(
            weights[layer.weight].reshape(-1, layer.shape[0], g.shape[2]) for layer, g in zip(below, flat, strict=True)
        ),
        offsets=tuple(compute_offset(layer, weights[layer.bias]) if layer.bias else 0.0 for layer in below),
        gradients=flat,
        lengths=tuple(map(torch.ones_like, flat)),
        low=low,
        span=high - low,
    )
    return _scale_equations(problem)


def build_grey_images(problem: ComposedEquations) -> Tensor:
    """Return an image of constant value 0.5 for each problem, (N, *inputs)."""
    k = problem.system.k
    return torch.full((len(k), *problem.layers[0].inputs), 0.5, dtype=k.dtype, device=k.device)


def build_sign_pattern(x: Tensor) -> Tensor:
    """Return fixed random signs in the shape of x, (N, *shape), the same for each image, as a test change of the images."""
    rng = torch.Generator().manual_seed(0)
    return (2 * torch.randint(2, x.shape[1:], generator=rng) - 1).to(x).expand_as(x)


def _scale_equations(problem: ComposedEquations) -> ComposedEquations:
    """Scale the equations, so that those of a layer have about equal norms, and all layers respond equally to a test change.

    The response is measured at grey images, see `build_sign_pattern`. The equations of the last of `problem.layers`, the one with
    too few equations for its own input, have equal norms already.
    """
    x = build_grey_images(problem)
    typical = [_average_slope(layer, slope) for layer, slope in zip(problem.below, problem.linearise(x).slopes, strict=True)]
    lengths = []
    for layer, k in zip(problem.below, problem.backpropagate(typical)[1], strict=True):
        inside = unfold(layer, torch.ones(1, *layer.product_inputs, dtype=x.dtype, device=x.device))
        lengths.append(invert_lengths((k.square() @ inside.mT).sqrt()))
    problem = replace(problem, lengths=tuple(lengths))
    answer = problem.linearise(x, problem.whole).apply(build_sign_pattern(x))
    system, scale = copy(problem.system), problem.scale
    top = _replace_zeros((answer.top.squared_norm() / _count_equations(scale)).sqrt())
    system.scale = EquationValues(
        scale.weights / broadcast_like(top, scale.weights), scale.gradients / broadcast_like(top, scale.gradients)
    )
    strengths = [_replace_zeros(rows.flatten(1).square().mean(dim=1).sqrt()) for rows in answer.below]
    return replace(
        problem, system=system, lengths=tuple(s / broadcast_like(t, s) for s, t in zip(lengths, strengths, strict=True))
    )


def _average_slope(layer: Layer, slope: Tensor) -> Tensor:
    if layer.activation.smooth:
        return slope
    return torch.full_like(slope, float(layer.activation.slope(torch.tensor([-1.0, 1.0])).mean()))


def _replace_zeros(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, 1)


def _count_equations(scale: EquationValues) -> Tensor:
    return ((scale.weights > 0).flatten(1).sum(dim=1) + (scale.gradients > 0).flatten(1).sum(dim=1)).clamp(min=1)
