"""Detection of pre-activations near zero whose sign was determined wrongly, for activations with a kink at zero such as ReLU.

The slope of the activation jumps at the kink, and with it k = dL/dz. One wrong sign makes the equations of a layer wrong, and
those of all layers before it. If the layer has more equations than unknowns, their residual then contains a multiple of the
input patch at that position.
"""

import torch
from torch import Tensor

from attacker.attacks.closed_form.rgap.system import EquationValues, LayerSystem, apply_maps, broadcast_like, unfold
from attacker.attacks.networks.activations import Activation

MIN_EXPLAINED = 0.04
"""Smallest share of the residual that the sign of a value must explain for the other sign to be tried."""


def flip_outputs(activation: Activation, f: Tensor) -> Tensor:
    """Return the outputs that a ReLU or leaky ReLU would have instead of f (N, ...) if its inputs had opposite signs.

    The input is unknown where a ReLU's output is 0; a very small positive output is returned there.
    """
    low = activation.slope(torch.full_like(f, -1))
    inside = torch.where(low > 0, f / low, compute_root_mean_square(f) * 1e-9)
    return torch.where(f > 0, -low * f, torch.where(f < 0, -inside, compute_root_mean_square(f) * 1e-9))


def find_doubtful_signs(
    system: LayerSystem, target: EquationValues, x: Tensor, f: Tensor, gradient: Tensor, near: Tensor
) -> Tensor:
    """Return a mask (N, *outputs), true at the one output of each problem whose changed sign would explain most of its residual.

    The sign of an output is the sign of its pre-activation, which decides the slope of ReLU there. The mask is false everywhere
    for a problem in which no sign explains more than the share MIN_EXPLAINED of the squared residual.
    system, target: the equations of the layer, and their right-hand sides without scaling.
    x:           least-squares solution of the equations, (N, *inputs).
    f, gradient: outputs of the layer and the loss gradient there, (N, *outputs).
    near:        mask (N, *outputs) of the values whose sign may be wrong.
    """
    layer, act, scale = system.layer, system.layer.activation, system.scale
    assert scale is not None
    left = (target * scale).add(system.apply(x), torch.full_like(f.flatten(1)[:, 0], -1))
    slope = act.slope(f)
    jump = gradient * (act.slope(torch.full_like(f, -1)) + 1 - 2 * slope)
    jump = jump.reshape(len(f), layer.shape[0], -1)
    columns = unfold(layer, apply_maps(layer.before, x))
    along = jump * ((scale.gradients * left.gradients) @ columns)
    length = jump.square() * (scale.gradients.square() @ columns.square())
    explained = torch.where((along > 0) & (length > 0), along.square() / length, 0).reshape(f.shape)
    explained = torch.where(near, explained, 0)
    maximum = explained.flatten(1).amax(dim=1)
    telling = (maximum > MIN_EXPLAINED * left.squared_norm()) & (maximum > 0)
    return (explained == broadcast_like(maximum, f)) & broadcast_like(telling, f)


def compute_root_mean_square(f: Tensor) -> Tensor:
    """Return the root mean square of f[i] for each problem i, (N, 1, ..., 1), with as many axes as f."""
    return broadcast_like(f.flatten(1).square().mean(dim=1).sqrt(), f)
