"""What an attacker who knows a defense does about it.

The algorithm of a defense is public and its randomness is private (Kerckhoffs). A channel is what that leaves: what can be
learnt from a received update alone, what to expect of an update that is simulated, and the power of the noise, which no
attacker can remove.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from defenses.base import Update

ChannelFacts = Mapping[str, Tensor]
"""What an attacker learns from one received update: a mask, a scale, the width of a cell; flat, by names of the channel's own."""


def _nothing(seen: Update) -> ChannelFacts:
    return {}


def silent(seen: Update) -> Tensor:
    """No noise: a 0-d zero."""
    return next(iter(seen.values())).new_zeros(())


class Channel(NamedTuple):
    """The public part of a defense. All three are functions of tensors alone, without branches on values: they are mapped.

    expect: from the update before the defense and what is known, the expected update after it; differentiable.
    learn:  from the received update, what is known. It is asked once, and `expect` many times.
    noise:  from the received update, the expected squared length of the noise in it, a 0-d tensor, in the update's units.
    """

    expect: Callable[[Update, ChannelFacts], Update]
    learn: Callable[[Update], ChannelFacts] = _nothing
    noise: Callable[[Update], Tensor] = silent


transparent = Channel(lambda update, known: update)
"""What no defense does."""


def compose(*channels: Channel) -> Channel:
    """The channel of a chain of defenses, from left to right.

    Each of them learns from what was received at the end of the chain. Noise that a later clip would shorten is counted in full:
    the bound that an attacker takes from it may be too wide.
    """

    if not channels:
        return transparent

    def expect(update: Update, known: ChannelFacts) -> Update:
        for i, channel in enumerate(channels):
            prefix = f"{i}/"
            own = {name.removeprefix(prefix): t for name, t in known.items() if name.startswith(prefix)}
            update = channel.expect(update, own)
        return update

    def learn(seen: Update) -> ChannelFacts:
        return {f"{i}/{name}": t for i, channel in enumerate(channels) for name, t in channel.learn(seen).items()}

    def noise(seen: Update) -> Tensor:
        return torch.stack([channel.noise(seen) for channel in channels]).sum()

    return Channel(expect, learn, noise)
