"""Defenses that add noise to an update."""

import math

import torch
from torch import Generator, Tensor

from defenses.base import Defense, Update, stateless


def normal_like(tensor: Tensor, rng: Generator) -> Tensor:
    """Standard normal values in the shape of `tensor`, drawn on the generator's device."""
    return torch.randn(tensor.shape, generator=rng, device=rng.device, dtype=tensor.dtype).to(tensor.device)


def gaussian(std: float) -> Defense:
    """Add independent normal noise to every coordinate.

    std: standard deviation in the update's units; not negative. Dwork & Roth 2014, section 3.5.3.
    """
    if not 0 <= std < math.inf:
        raise ValueError(f"gaussian: std must be finite and not negative, got {std}")

    def noisy(update: Update, rng: Generator) -> Update:
        noise = {name: normal_like(update[name], rng) for name in sorted(update)}
        return {name: t + std * noise[name] for name, t in update.items()}

    return stateless(noisy)
