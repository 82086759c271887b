"""What an attacker who knows a defense does about it.

The algorithm of a defense is public and its randomness is private (Kerckhoffs). A channel is the deterministic part,
which the attacker applies to the update that it simulates, and the power of the noise, which no attacker can remove.
"""

from collections.abc import Callable
from typing import NamedTuple

from defenses.base import Update
from defenses.clipping import scale_to


class Channel(NamedTuple):
    """The public part of a defense.

    expect:    a differentiable function from the update before the defense to the expected update after it.
    noise_std: standard deviation of the noise per coordinate, in the update's units.
    """

    expect: Callable[[Update], Update]
    noise_std: float = 0.0


transparent = Channel(lambda update: update)
"""What no defense does."""


def compose(*channels: Channel) -> Channel:
    """The channel of a chain of defenses, from left to right.

    Noise that a later clip would shorten is counted in full: the bound that an attacker takes from it may be too wide.
    """

    if not channels:
        return transparent

    def expect(update: Update) -> Update:
        for channel in channels:
            update = channel.expect(update)
        return update

    return Channel(expect, noise_std=sum(channel.noise_std**2 for channel in channels) ** 0.5)


def clip(max_norm: float) -> Channel:
    """The attacker clips the update that it simulates."""
    return Channel(lambda update: scale_to(update, max_norm))


def gaussian(std: float) -> Channel:
    """The attacker knows how far from zero its residual must end."""
    return Channel(lambda update: update, noise_std=std)
