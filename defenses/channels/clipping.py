"""Clips: the attacker clips the update that it simulates. Beyond the bound, a length says nothing."""

from defenses.channel import Channel
from defenses.clipping import scale_each_to, scale_to


def clip(max_norm: float) -> Channel:
    """The length of the whole update is lost beyond the bound."""
    return Channel(lambda update, known: scale_to(update, max_norm))


def clip_each(max_norm: float) -> Channel:
    """The length of each tensor is lost beyond the bound."""
    return Channel(lambda update, known: scale_each_to(update, max_norm))
