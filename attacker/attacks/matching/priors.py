"""The prior of a search: terms of its loss that favour plausible examples, with the total variation and its weight."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Belief = Callable[[Tensor], Tensor]
"""Maps examples x (N, *shape) in [0, 1] to a 0-d tensor that is added to the loss."""

NEIGHBOUR_CONTRAST = 0.15
"""Scale of the Laplace distribution assumed for differences of neighbouring pixels in [0, 1]. It was chosen among a few values,
as the one with which photographs were recovered best from noisy gradients."""

MAX_NOISE_RATIO = 100.0
"""Largest ratio of noise to signal for `Prior.tv_of_noise`."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """The prior of a search.

    tv:       weight of the total variation of pixels in [0, 1] (`total_variation`), relative to the distance between the observed
              gradient and a zero gradient (weighted mean over observations; 1 for the cosine). No effect for table rows.
    denoised: for images, if the noise variance is known and the distance is squared, add a total variation whose weight follows
              from that variance, see `compute_map_tv_weight`.
    tv_of_noise: for images, if the noise variance is known and the distance is a cosine, weight of a total variation that is
              added, times the ratio of noise to signal in the squared norm of the observed gradient, at most MAX_NOISE_RATIO.
    belief:   a further term of the loss, a function of the examples that is added as it is; None for none.
    """

    tv: float = 0.0
    denoised: bool = False
    tv_of_noise: float = 0.0
    belief: Belief | None = None


def total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of vertical neighbours plus that of horizontal ones, over all of x, a 0-d tensor.

    x: images (N, C, H, W).
    Source: Geiping et al. 2020, as in their code. An axis of one pixel contributes 0.
    """
    down, across = x[..., 1:, :] - x[..., :-1, :], x[..., :, 1:] - x[..., :, :-1]
    return torch.stack([t.abs().sum() / max(1, t.numel()) for t in (down, across)]).sum()


def compute_map_tv_weight(variance: Tensor, values: int) -> Tensor:
    """Return the weight of the total variation for a MAP estimate under Gaussian noise of known variance.

    The negative log-likelihood of Gaussian noise is distance / (2 variance), with the squared distance of gradients. If the
    differences of neighbouring pixels have a Laplace distribution with scale NEIGHBOUR_CONTRAST, the negative log-prior is about
    values / NEIGHBOUR_CONTRAST * total_variation. Multiplied by 2 variance, their sum is distance + weight * total_variation.
    variance: of the noise of each gradient coordinate. values: number of pixel values of all examples together.
    """
    return 2 * variance * values / NEIGHBOUR_CONTRAST
