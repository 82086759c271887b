"""Defenses that clip the norm of an update."""

import math

import torch
from torch import Generator

from defenses.base import Defense, Update, global_norm, stateless


def scale_to(update: Update, max_norm: float) -> Update:
    """Return the update scaled down to the Euclidean norm `max_norm`, up to rounding, if its norm is larger.

    If the update's norm is at most `max_norm`, the values do not change, bit for bit.
    """
    norm = global_norm(update)
    scale = torch.full_like(norm, max_norm) / norm.clamp(min=max_norm)  # exactly 1 if norm <= max_norm
    return {name: t * scale.to(t.dtype) for name, t in update.items()}


def scale_each_to(update: Update, max_norm: float) -> Update:
    """Return the update with each tensor whose Euclidean norm is above `max_norm` scaled down to it, up to rounding."""
    return {name: scale_to({name: t}, max_norm)[name] for name, t in update.items()}


def clip(max_norm: float) -> Defense:
    """Clip the Euclidean norm of the whole update.

    Returns this defense, a `Defense`.
    max_norm: largest norm that is sent, up to rounding, in the update's units; positive and finite.
    Source: Geyer et al. 2017, algorithm 1.
    """
    _check("clip", max_norm)

    def scale(update: Update, rng: Generator) -> Update:
        return scale_to(update, max_norm)

    return stateless(scale)


def clip_each(max_norm: float) -> Defense:
    """Clip the Euclidean norm of each tensor on its own.

    Returns this defense, a `Defense`.
    max_norm: largest norm of a tensor that is sent, up to rounding, in the update's units; positive and finite.
    Source: McMahan et al. 2018, per-layer clipping with one bound for all tensors.
    """
    _check("clip_each", max_norm)

    def scale(update: Update, rng: Generator) -> Update:
        return scale_each_to(update, max_norm)

    return stateless(scale)


def _check(name: str, max_norm: float) -> None:
    if not 0 < max_norm < math.inf:
        raise ValueError(f"{name}: max_norm must be positive and finite, got {max_norm}")
