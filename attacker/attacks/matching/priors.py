"""What an attacker believes of examples before it sees any gradient."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Belief = Callable[[Tensor], Tensor]
"""From examples x (N, *shape) in [0, 1], a 0-d tensor that is added to the loss."""

CONTRAST = 0.15
"""Scale of the Laplace distribution that differences of neighbouring pixels in [0, 1] are taken to have: of a few, the one by
which photographs behind noise came back best."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """The prior of a search.

    tv:       weight of the total variation of pixels in [0, 1] (`total_variation`), relative to the mean loss of a zero gradient:
              the mean over observations, by their weights, of the distance between the observed gradient and zeros. That distance
              is 1 for a cosine. The same in every attack, whatever the model's normalisation.
    denoised: where noise of known power is in the gradients, and distances are squared, add total variation by as much as the
              noise leaves open (`belief_behind_noise`).
    belief:   a further term of the loss, of examples as they are, in its own units.
    """

    tv: float = 0.0
    denoised: bool = False
    belief: Belief | None = None


def total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbours, down plus across (Geiping et al. 2020, as in their code).

    For images (N, C, H, W); along a side of one pixel there is no difference.
    """
    down, across = x[..., 1:, :] - x[..., :-1, :], x[..., :, 1:] - x[..., :, :-1]
    return torch.stack([t.abs().sum() / max(1, t.numel()) for t in (down, across)]).sum()


def belief_behind_noise(variance: Tensor, values: int) -> Tensor:
    """Return the weight of total variation that makes a squared distance and it a posterior, up to a factor (MAP estimate).

    variance: of the noise of each coordinate of the gradient. values: of all examples. Gaussian noise has the negative
    log-likelihood distance / (2 variance), and `values` differences with Laplace's distribution have `values / CONTRAST` times
    their mean; twice the variance times their sum is the distance and this weight times `total_variation`.
    """
    return 2 * variance * values / CONTRAST
