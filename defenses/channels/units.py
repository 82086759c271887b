"""Channel of defenses in units of the gradient: the attacker converts as the client does."""

from defenses.channel import Channel
from defenses.units import to_gradient, to_update


def in_gradient_units(defense: Channel, learning_rate: float) -> Channel:
    """Return the channel of `in_gradient_units`, in units of the update."""
    return Channel(
        expect=lambda update, known: to_update(defense.expect(to_gradient(update, learning_rate), known), learning_rate),
        learn=lambda seen: defense.learn(to_gradient(seen, learning_rate)),
        noise=lambda seen: defense.noise(to_gradient(seen, learning_rate)) * learning_rate**2,
    )
