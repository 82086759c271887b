"""Gradients of the loss for each label, at the outputs of a first linear layer before its activation, for given inputs.

By the gradients for two labels at once, inputs are recognised that clients have mixed of two examples.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from attacker.attacks.closed_form.rgap.system import apply_maps
from attacker.attacks.networks.chain import Chain
from defenses.base import Tensors
from fedsim import models

MAX_PAIR_MISFIT = 0.02
"""Largest unexplained share of a gradient at which two labels explain it."""
MIN_SINGLE_MISFIT = 0.1
"""Smallest unexplained share of a gradient at which a single label does not explain it."""
MIN_LABEL_SHARE = 0.05
"""Smallest weight of the rarer label, as a share of the sum of both weights, at which a label counts as mixed."""
MIXED_LABELS = (
    "the gradient of an input is that of two labels at once: clients mix their examples, as MixUp and CutMix do, and these are "
    "the mixed inputs"
)


def compute_label_gradients(chain: Chain, weights: Tensors, x: Tensor, loss: str, classes: int) -> Tensor:
    """Return the gradient of each example's own loss for each of K labels, (N, K, width).

    x: (N, F), inputs of the first layer, which has `width` neurons. loss: name of the loss. classes: K.
    """
    measure = models.find_loss(loss)

    def compute_losses(logits: Tensor) -> list[Tensor]:
        y = (torch.full((len(x),), label, device=x.device) for label in range(classes))
        return [len(x) * measure(logits, label) for label in y]

    return torch.stack(_differentiate(chain, weights, x, compute_losses), dim=1)


def compute_output_gradient(chain: Chain, weights: Tensors, x: Tensor) -> Tensor:
    """Return the gradient of the sum of all outputs by the inputs x (N, F), (N, width), which completes those of all labels."""
    return _differentiate(chain, weights, x, lambda logits: [logits.sum()])[0]


def find_mixed_labels(expected: Tensor, observed: Tensor) -> Tensor:
    """Return a mask (N,) of the examples whose gradients combine the gradients for two labels with different weights.

    The gradient of cross entropy is linear in the label, so that an input with the weight w_a of label a and w_b of label b, as
    MixUp and CutMix make it, has the gradient w_a g_a + w_b g_b. All pairs are solved for by least squares, and weights may have
    any sum, since learning rate and loss may be misstated. False for fewer than three labels, which leave nothing to compare.

    expected: (K, N, width) gradients dL/dz of each input with each of K labels. observed: (N, width) the observed ones.
    """
    if len(expected) < 3 or not observed.shape[1]:
        return torch.zeros(len(observed), dtype=torch.bool, device=observed.device)
    each, length = expected.transpose(0, 1), observed.norm(dim=1).clamp(min=torch.finfo(observed.dtype).tiny)
    alone = (1 - torch.cosine_similarity(each, observed[:, None], dim=2).clamp(0, 1).square()).sqrt().amin(dim=1)
    a, b = torch.combinations(torch.arange(len(expected), device=observed.device)).T
    gram = each @ each.mT
    products = (each @ observed[:, :, None])[:, :, 0]
    first, second, between = gram[:, a, a], gram[:, b, b], gram[:, a, b]
    tiny = torch.finfo(observed.dtype).eps * first * second
    scale = (first * second - between.square()).clamp(min=tiny + torch.finfo(observed.dtype).tiny)
    weights = torch.stack(
        [products[:, a] * second - products[:, b] * between, products[:, b] * first - products[:, a] * between], dim=2
    )
    weights = weights / scale[:, :, None]
    missed = (weights[..., :1] * each[:, a] + weights[..., 1:] * each[:, b] - observed[:, None]).norm(dim=2) / length[:, None]
    best = missed.argmin(dim=1)
    rows = torch.arange(len(observed), device=observed.device)
    pair = weights[rows, best]
    share = pair.amin(dim=1) / pair.sum(dim=1)
    mixed: Tensor = (missed[rows, best] <= MAX_PAIR_MISFIT) & (alone >= MIN_SINGLE_MISFIT) & (share >= MIN_LABEL_SHARE)
    return mixed & (pair > 0).all(dim=1)


def _differentiate(chain: Chain, weights: Tensors, x: Tensor, measure: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
    """Return the gradients (N, width) of the numbers that `measure` computes from the network's outputs."""
    with torch.enable_grad():
        z = _compute_outputs(chain, weights, x, 0, 1).detach().requires_grad_()
        logits = _compute_outputs(chain, weights, chain.layers[0].activation.forward(z), 1, len(chain.layers))
        return [torch.autograd.grad(total, z, retain_graph=True)[0].flatten(1) for total in measure(logits)]


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
