"""Gradients of two labels at once, by which inputs that clients have mixed of two examples are recognised."""

import torch
from torch import Tensor

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


def find_mixed_labels(expected: Tensor, part: Tensor) -> Tensor:
    """Return a mask (N,) of the examples whose gradients combine the gradients for two labels with different weights.

    The gradient of cross entropy is linear in the label, so that an input with the weight w_a of label a and w_b of label b, as
    MixUp and CutMix make it, has the gradient w_a g_a + w_b g_b. All pairs are solved for by least squares, and weights may have
    any sum, since learning rate and loss may be misstated. False for fewer than three labels, which leave nothing to compare.

    expected: (K, N, width) gradients dL/dz of each input with each of K labels. part: (N, width) the observed ones.
    """
    if len(expected) < 3 or not part.shape[1]:
        return torch.zeros(len(part), dtype=torch.bool, device=part.device)
    each, length = expected.transpose(0, 1), part.norm(dim=1).clamp(min=torch.finfo(part.dtype).tiny)
    alone = (1 - torch.cosine_similarity(each, part[:, None], dim=2).clamp(0, 1).square()).sqrt().amin(dim=1)
    a, b = torch.combinations(torch.arange(len(expected), device=part.device)).T
    gram = each @ each.mT
    products = (each @ part[:, :, None])[:, :, 0]
    first, second, between = gram[:, a, a], gram[:, b, b], gram[:, a, b]
    tiny = torch.finfo(part.dtype).eps * first * second
    scale = (first * second - between.square()).clamp(min=tiny + torch.finfo(part.dtype).tiny)
    weights = torch.stack(
        [products[:, a] * second - products[:, b] * between, products[:, b] * first - products[:, a] * between], dim=2
    )
    weights = weights / scale[:, :, None]
    missed = (weights[..., :1] * each[:, a] + weights[..., 1:] * each[:, b] - part[:, None]).norm(dim=2) / length[:, None]
    best = missed.argmin(dim=1)
    rows = torch.arange(len(part), device=part.device)
    pair = weights[rows, best]
    share = pair.amin(dim=1) / pair.sum(dim=1)
    mixed: Tensor = (missed[rows, best] <= MAX_PAIR_MISFIT) & (alone >= MIN_SINGLE_MISFIT) & (share >= MIN_LABEL_SHARE)
    return mixed & (pair > 0).all(dim=1)
