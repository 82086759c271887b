"""Defenses that bound the length of an update."""

from torch import Generator

from defenses.base import Defense, Update, global_norm, stateless


def scale_to(update: Update, max_norm: float) -> Update:
    """Scale the whole update down to `max_norm` when it is longer: no branch, no epsilon, exact for short updates."""
    scale = max_norm / global_norm(update).clamp(min=max_norm)
    return {name: t * scale.to(t.dtype) for name, t in update.items()}


def clip(max_norm: float) -> Defense:
    """Clip the Euclidean norm of the whole update.

    max_norm: largest norm that is sent, in the update's units; positive. Geyer et al. 2017, algorithm 1.
    """
    if not max_norm > 0:
        raise ValueError(f"clip: max_norm must be positive, got {max_norm}")

    def scaled(update: Update, rng: Generator) -> Update:
        return scale_to(update, max_norm)

    return stateless(scaled)
