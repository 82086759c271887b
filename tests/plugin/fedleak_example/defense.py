"""A defense: the function that a client applies to its update, and the channel, the attacker's model of it."""

from defenses import Channel, Defense, Kind, Update, stateless


def shrink(factor: float) -> Defense:
    """Multiply the update by a constant between 0 and 1. Source: an example."""
    if not 0 < factor <= 1:
        raise ValueError(f"shrink: factor must be in (0, 1], got {factor}")
    return stateless(lambda update, rng: _scaled(update, factor))


def shrink_channel(factor: float) -> Channel:
    """Return the channel, which shrinks the update that the attacker simulates."""
    return Channel(lambda update, known: _scaled(update, factor))


def _scaled(update: Update, factor: float) -> Update:
    return {name: factor * tensor for name, tensor in update.items()}


SHRINK = Kind(shrink, shrink_channel, codec="dense", example="0.5", limit="1")
