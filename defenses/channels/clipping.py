"""Channels of clipping: the attacker clips the simulated update in the same way."""

from defenses.channel import Channel
from defenses.clipping import scale_each_to, scale_to


def clip(max_norm: float) -> Channel:
    """Return the channel of `clip`: norms of the whole update above `max_norm` are not visible."""
    return Channel(lambda update, known: scale_to(update, max_norm))


def clip_each(max_norm: float) -> Channel:
    """Return the channel of `clip_each`: norms of a tensor above `max_norm` are not visible."""
    return Channel(lambda update, known: scale_each_to(update, max_norm))
