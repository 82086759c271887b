"""The loss of the Cocktail Party attack as published, and its search by Adam (Kariyappa et al. 2023).

For sources S = W X of whitened pixels X, with rows w_i of W of norm 1, the loss is

    - mean_i (mean_n log cosh s_in)^2 + d mean_ij (exp(T |cos(w_i, w_j)|) - 1) + t TV(S)

the negentropy of the sources, the decorrelation of the rows of W, and the total variation TV: the mean absolute difference of
vertical neighbours among the pixels of the sources, plus the mean absolute difference of horizontal neighbours.
The public code computes the first term and then sets it to zero. Here the first term counts, as the paper says. The pairs i = j
add a constant, exp(T) - 1 each, in which float32 would lose the other terms; the terms of these pairs are set to zero.
"""

from dataclasses import dataclass
from math import log

import torch
from torch import Generator, Tensor
from torch.nn import functional

from attacker.attacks.closed_form.cocktail.components import Unmixing
from fedsim.recording.observation import DataSpec

DECORRELATION, TEMPERATURE, TOTAL_VARIATION = 1.47, 12.4, 3.1
"""Weights d and t, and temperature T, of the paper's experiments on Tiny-ImageNet with 128 images."""
LEARNING_RATE = 1e-3
START_NOISE = 0.1
"""Standard deviation of the noise that the starts beyond the first add to the identity."""


@dataclass(frozen=True)
class PublishedLoss:
    """The loss for whitened mixtures of images, (R, N) with N pixels, from which each mixture's mean over pixels was subtracted.

    means: the subtracted means after the same whitening, (R, 1). They are added again before the total variation is computed, but
           do not change the total variation, since each mean is one constant for a whole image.
    """

    whitened: Tensor
    means: Tensor
    data: DataSpec

    def compute(self, w: Tensor) -> Tensor:
        """Return the losses (K,) of unmixings w (K, R, R) with rows of norm 1."""
        s = w @ self.whitened
        size = s.abs()
        cosh = size + functional.softplus(-2 * size) - log(2)
        negentropy = cosh.mean(dim=2).square().mean(dim=1)
        cosine = (w @ w.transpose(1, 2)).abs()
        others = 1 - torch.eye(w.shape[1], dtype=w.dtype, device=w.device)
        alike = (((TEMPERATURE * cosine).exp() - 1) * others).mean(dim=(1, 2))
        images = (s + w @ self.means).reshape(len(w), -1, *self.data.shape)
        down, across = images.diff(dim=-2), images.diff(dim=-1)
        rough = down.abs().flatten(1).mean(dim=1) + across.abs().flatten(1).mean(dim=1)
        return DECORRELATION * alike + TOTAL_VARIATION * rough - negentropy


def search_published(loss: PublishedLoss, *, steps: int, restarts: int, rng: Generator) -> Unmixing:
    """Return the unmixing with the lowest loss of `restarts` searches of `steps` iterations, which run as one batch.

    The first starts at the identity matrix, the others at the identity plus random noise.
    """
    count = len(loss.whitened)
    start = torch.eye(count).repeat(restarts, 1, 1)
    start[1:] += START_NOISE * torch.randn(restarts - 1, count, count, generator=rng)
    w = start.to(loss.whitened).requires_grad_()
    optimiser = torch.optim.Adam([w], lr=LEARNING_RATE)
    for _ in range(steps):
        (w.grad,) = torch.autograd.grad(loss.compute(functional.normalize(w, dim=2)).sum(), [w])
        optimiser.step()
    result = functional.normalize(w.detach(), dim=2)
    losses = loss.compute(result)
    best = int(losses.argmin())
    return Unmixing(result[best], float(losses[best]))
