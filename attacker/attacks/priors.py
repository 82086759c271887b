"""What an attacker believes of examples before it sees any gradient. Priors take the normalised batch (N, *shape)."""

from collections.abc import Callable

import torch
from torch import Tensor

Prior = Callable[[Tensor], Tensor]


def flat(x: Tensor) -> Tensor:
    """No belief."""
    return torch.zeros((), dtype=x.dtype, device=x.device)


def total_variation(weight: float) -> Prior:
    """`weight` times the mean absolute difference of neighbours, down plus across (Geiping et al. 2020, as in their code).

    For images (N, C, H, W) of at least 2x2 pixels.
    """

    def prior(x: Tensor) -> Tensor:
        down = (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
        across = (x[..., :, 1:] - x[..., :, :-1]).abs().mean()
        return weight * (down + across)

    return prior
