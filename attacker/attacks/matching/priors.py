"""What an attacker believes of examples before it sees any gradient. Priors take the normalised batch (N, *shape)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Prior = Callable[[Tensor], Tensor]
CONTRAST = 0.15
"""Scale of the Laplace distribution that differences of neighbours are taken to have, of pixels in [0, 1]: of a few, the one by
which photographs behind noise came back best."""


def flat(x: Tensor) -> Tensor:
    """No belief."""
    return torch.zeros((), dtype=x.dtype, device=x.device)


def total_variation(weight: float) -> Prior:
    """`weight` times the mean absolute difference of neighbours, down plus across (Geiping et al. 2020, as in their code).

    For images (N, C, H, W); along a side of one pixel there is no difference.
    """
    return partial(_variation, weight)


def _variation(weight: float, x: Tensor) -> Tensor:
    down, across = x[..., 1:, :] - x[..., :-1, :], x[..., :, 1:] - x[..., :, :-1]
    return weight * torch.stack([t.abs().sum() / max(1, t.numel()) for t in (down, across)]).sum()


def belief_behind_noise(variance: Tensor, values: int) -> Tensor:
    """The weight of total variation that makes a squared distance and it a posterior, up to a factor (Bayes' rule).

    variance: of the noise of each coordinate of the gradient. values: of all examples. Gaussian noise has the negative
    log-likelihood distance / (2 variance), and `values` differences with Laplace's distribution have `values / CONTRAST` times
    their mean; twice the variance times their sum is the distance and this weight times `total_variation`.
    """
    return 2 * variance * values / CONTRAST
