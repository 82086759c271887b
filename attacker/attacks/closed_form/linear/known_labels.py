"""Inference of labels for those examples of a batch whose inputs were recovered, while the others are unknown."""

from typing import NamedTuple

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.batch_labels import MAX_SCALED_MISFIT
from attacker.attacks.closed_form.linear.mixed_labels import MIN_SINGLE_MISFIT, find_mixed_labels
from attacker.attacks.closed_form.rgap.system import apply_maps
from attacker.attacks.networks.chain import Chain
from defenses.base import Tensors
from fedsim import models

MAX_UNEXPLAINED = 1e-3
"""Largest unexplained share of a neuron's gradient at which the neuron is used to determine labels."""


class AssignedLabels(NamedTuple):
    """Labels y (K,) of inputs, and a mask (K,) of the inputs with gradients for two labels each (`find_mixed_labels`)."""

    y: Tensor
    mixed: Tensor


def assign_labels(
    chain: Chain, weights: Tensors, gradient: Tensors, x: Tensor, *, loss: str, classes: int, examples: int
) -> AssignedLabels:
    """Return a label for each input x (K, F) of a chain that begins with a linear layer, and which inputs have mixed labels.

    The first layer's gradient is D^T [X, 1], and the row of D of an example depends on its label. Only neurons whose gradient the
    known inputs explain are used, since unknown examples do not affect them. If every label leaves more than the share
    MAX_SCALED_MISFIT of an example's row unexplained, the label whose gradient has the most similar direction is chosen.
    loss: name of the loss. classes: number of labels. examples: batch size, which may exceed K.
    """
    layer = chain.layers[0]
    inputs = apply_maps(layer.before, x.reshape(len(x), *layer.inputs)).flatten(1)
    rows = gradient[layer.weight]
    if layer.bias is not None:
        rows = torch.cat([rows, gradient[layer.bias][:, None]], dim=1)
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    d = rows @ torch.linalg.pinv(inputs)
    missed, length = (rows - d @ inputs).norm(dim=1), rows.norm(dim=1)
    seen = (missed <= MAX_UNEXPLAINED * length) & (length > 0)
    expected = _compute_gradients(chain, weights, x, loss, classes) / examples
    expected, part = expected[..., seen], d.T[:, seen]
    off: Tensor = (expected - part).norm(dim=-1)
    scaled = off.amin(dim=0) <= MAX_SCALED_MISFIT * part.norm(dim=-1)
    y = torch.where(scaled, off.argmin(dim=0), torch.cosine_similarity(expected, part[None], dim=-1).argmax(dim=0))
    unexplained = off.amin(dim=0) > MIN_SINGLE_MISFIT * part.norm(dim=-1)
    return AssignedLabels(y, unexplained & find_mixed_labels(expected, part))


def _compute_gradients(chain: Chain, weights: Tensors, x: Tensor, loss: str, classes: int) -> Tensor:
    """Return the gradient of each example's own loss at the first layer's outputs for every label, (classes, K, width)."""
    first, measure = chain.layers[0], models.find_loss(loss)
    with torch.enable_grad():
        z = _compute_outputs(chain, weights, x, 0, 1).detach().requires_grad_()
        logits = _compute_outputs(chain, weights, first.activation.forward(z), 1, len(chain.layers))
        found = []
        for label in range(classes):
            total = len(x) * measure(logits, torch.full((len(x),), label, device=x.device))
            found.append(torch.autograd.grad(total, z, retain_graph=True)[0].flatten(1))
    return torch.stack(found)


def _compute_outputs(chain: Chain, weights: Tensors, x: Tensor, begin: int, end: int) -> Tensor:
    """Compute the pre-activations of layer `end - 1` from the inputs x of layer `begin`."""
    for i, layer in enumerate(chain.layers[begin:end], start=begin):
        z = layer.apply_weight(apply_maps(layer.before, x.reshape(len(x), *layer.inputs)), weights[layer.weight])
        if layer.bias is not None:
            z = z + weights[layer.bias].reshape(-1, *[1] * (z.ndim - 2))
        x = apply_maps(layer.after, z)
        if i < end - 1:
            x = layer.activation.forward(x)
    return x
