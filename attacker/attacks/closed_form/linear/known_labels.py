"""Inference of labels for those examples of a batch whose inputs were recovered, while the others are unknown."""

from typing import NamedTuple

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.batch_labels import MAX_SCALED_MISFIT
from attacker.attacks.closed_form.linear.label_gradients import MIN_SINGLE_MISFIT, compute_label_gradients, find_mixed_labels
from attacker.attacks.closed_form.rgap.system import apply_maps
from attacker.attacks.networks.chain import Chain
from defenses.base import Tensors

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
    expected = compute_label_gradients(chain, weights, x, loss, classes).transpose(0, 1) / examples
    expected, part = expected[..., seen], d.T[:, seen]
    off: Tensor = (expected - part).norm(dim=-1)
    scaled = off.amin(dim=0) <= MAX_SCALED_MISFIT * part.norm(dim=-1)
    y = torch.where(scaled, off.argmin(dim=0), torch.cosine_similarity(expected, part[None], dim=-1).argmax(dim=0))
    unexplained = off.amin(dim=0) > MIN_SINGLE_MISFIT * part.norm(dim=-1)
    return AssignedLabels(y, unexplained & find_mixed_labels(expected, part))
