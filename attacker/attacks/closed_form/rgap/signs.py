"""Detection of values near the kink of a ReLU that were assigned to the wrong side.

The slope jumps at the kink, and with it k. One wrong sign makes exact equations of a layer wrong, and those of all layers before
it. It shows in the residual of the layer's equations, as a multiple of the input patch at that value's place.
"""

import torch
from torch import Tensor

from attacker.attacks.closed_form.rgap.system import EquationValues, System, columns_of, through
from attacker.attacks.networks.activations import Activation

TELLING = 0.04
"""Smallest share of the residual that a value must explain to be tried on the other side."""


def other_side(activation: Activation, f: Tensor) -> Tensor:
    """Each f (N, ...) as it would be, as far from the kink, on its other side."""
    low = activation.slope(torch.full_like(f, -1))
    inside = torch.where(low > 0, f / low, level(f) * 1e-9)
    return torch.where(f > 0, -low * f, torch.where(f < 0, -inside, level(f) * 1e-9))


def doubted(system: System, target: EquationValues, x: Tensor, f: Tensor, gradient: Tensor, near: Tensor) -> Tensor:
    """At most one value of each problem, (N, *outputs) bool: the one whose other side explains most of what is left.

    x: (N, *inputs) what solves the equations, but for something. f, gradient: (N, *outputs), and that of the loss there.
    near: (N, *outputs) which ones may be on the other side.
    """
    layer, act, scale = system.layer, system.layer.activation, system.scale
    assert scale is not None
    left = (target * scale).plus(system.apply(x), torch.full_like(f.flatten(1)[:, 0], -1))
    slope = act.slope(f)
    jump = gradient * (act.slope(torch.full_like(f, -1)) + 1 - 2 * slope)
    jump = jump.reshape(len(f), layer.shape[0], -1)
    columns = columns_of(layer, through(layer.before, x))
    along = jump * ((scale.gradients * left.gradients) @ columns)
    length = jump.square() * (scale.gradients.square() @ columns.square())
    explained = torch.where((along > 0) & (length > 0), along.square() / length, 0).reshape(f.shape)
    explained = torch.where(near, explained, 0)
    most = explained.flatten(1).amax(dim=1)
    telling = (most > TELLING * left.squared_norm()) & (most > 0)
    return (explained == _each(most, f)) & _each(telling, f)


def level(f: Tensor) -> Tensor:
    """The root mean square of each problem's f, to go with it."""
    return _each(f.flatten(1).square().mean(dim=1).sqrt(), f)


def _each(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))
