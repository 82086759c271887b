"""Channels: an attacker's model of a defense.

The attacker knows the algorithm of a defense, but not the values that it draws at random. A channel has three parts: what the
attacker can learn from a received update, the expected effect on a simulated update, and the power of the remaining noise. Some
channels have a fourth: the expected effect over all rounds of a client, for defenses with a state, such as error feedback.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from defenses.base import Update

ChannelFacts = Mapping[str, Tensor]
"""What a channel learned from one received update, such as a mask, a scale or a quantisation step: tensors by name."""

ChannelState = Mapping[str, Tensor]
"""The attacker's simulation of a defense's state after a round: tensors by name. It is empty before a client's first round."""
Follow = Callable[[Update, ChannelState, ChannelFacts], tuple[Update, ChannelState]]
"""Maps (simulated update, simulated state before the round, known) to the expected message and the next state."""


def _learn_nothing(seen: Update) -> ChannelFacts:
    return {}


def compute_no_noise(seen: Update) -> Tensor:
    """Return 0 as a 0-d tensor: the noise power of a defense without noise."""
    return next(iter(seen.values())).new_zeros(())


class Channel(NamedTuple):
    """The attacker's model of a defense, as functions. They must not branch on tensor values, since they run under `vmap`.

    expect: maps (simulated update, known) to the expected update after the defense; differentiable.
    learn:  maps the received update to `known`. It is called once per update, `expect` once per iteration.
    noise:  maps the received update to the expected squared norm of its noise: a 0-d tensor, in squared units of the update.
    follow: as `expect`, for attacks on all rounds of a client in order: it also simulates the defense's state, and what unsent
            coordinates reveal. None if the defense has no state and its unsent coordinates reveal nothing; `expect` then applies
            to each round.
    """

    expect: Callable[[Update, ChannelFacts], Update]
    learn: Callable[[Update], ChannelFacts] = _learn_nothing
    noise: Callable[[Update], Tensor] = compute_no_noise
    follow: Follow | None = None

    def follow_round(self, update: Update, state: ChannelState, known: ChannelFacts) -> tuple[Update, ChannelState]:
        """Return the expected update of the next round and the state after it.

        Without `follow`, these are the result of `expect` and an empty state.
        """
        return self.follow(update, state, known) if self.follow is not None else (self.expect(update, known), {})


transparent = Channel(lambda update, known: update)
"""Channel of an update without a defense."""


def compose_channels(*channels: Channel) -> Channel:
    """Return the channel of a chain of defenses that are applied from left to right.

    Every channel learns from the received update, which is the output of the whole chain. The noise power is the sum of those of
    all channels. It is an upper bound, since a later clip may reduce noise.
    """

    if not channels:
        return transparent

    def expect(update: Update, known: ChannelFacts) -> Update:
        for i, channel in enumerate(channels):
            update = channel.expect(update, _select_own(known, i))
        return update

    def follow(update: Update, state: ChannelState, known: ChannelFacts) -> tuple[Update, ChannelState]:
        after: dict[str, Tensor] = {}
        for i, channel in enumerate(channels):
            update, own = channel.follow_round(update, _select_own(state, i), _select_own(known, i))
            after |= {f"{i}/{name}": t for name, t in own.items()}
        return update, after

    def learn(seen: Update) -> ChannelFacts:
        return {f"{i}/{name}": t for i, channel in enumerate(channels) for name, t in channel.learn(seen).items()}

    def compute_noise(seen: Update) -> Tensor:
        return torch.stack([channel.noise(seen) for channel in channels]).sum()

    return Channel(expect, learn, compute_noise, follow if any(channel.follow for channel in channels) else None)


def _select_own(tensors: Mapping[str, Tensor], i: int) -> dict[str, Tensor]:
    """Return the tensors of the i-th channel of a chain, whose names begin with "{i}/", by their names without this prefix."""
    prefix = f"{i}/"
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
