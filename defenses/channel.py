"""Channels: an attacker's model of a defense.

The attacker knows the algorithm and the settings of a defense, but not the values that it draws at random. A channel has three
parts: what the attacker learns from a received update, the expected effect on a simulated update, and the power of the remaining
noise. Some channels have a fourth: the expected effect in each of a client's rounds in order. This part is for defenses with a
state, such as error feedback, and for defenses whose unsent coordinates reveal something.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from defenses.base import Update

ChannelFacts = Mapping[str, Tensor]
"""What a channel learned from one received update, such as a mask, a scale or a quantisation step: tensors by name."""

ChannelState = Mapping[str, Tensor]
"""The attacker's simulation of a defense's state after a round: tensors by name. It is empty before a client's first round."""
Expect = Callable[[Update, ChannelFacts], Update]
"""Maps (simulated update, known) to the expected message."""
Follow = Callable[[Update, ChannelState, ChannelFacts], tuple[Update, ChannelState]]
"""Maps (simulated update, simulated state before the round, known) to the expected message and the next state."""


def _learn_nothing(received: Update) -> ChannelFacts:
    return {}


def compute_no_noise(received: Update) -> Tensor:
    """Return 0, the noise power of a defense without noise: a 0-d tensor with dtype and device of the update `received`."""
    return next(iter(received.values())).new_zeros(())


class Channel(NamedTuple):
    """The attacker's model of a defense, as functions. They must not branch on tensor values, since they run under `vmap`.

    learn:  maps the received update to `known`: tensors by name that tell what this update reveals about the defense's random
            choices, such as which coordinates were sent. `learn` is called once per received update.
    expect: maps (simulated update, known) to the expected update after the defense; differentiable.
    noise:  maps the received update to the expected squared norm of the noise in it, or an estimate: a 0-d tensor.
    expect_approximate: `expect` for a simulation that treats several local steps as one, in which a tensor's size is not that of
            the client's. None if such a simulation needs no other model; `expect` then applies.
    follow: for attacks on all rounds of a client in order: maps (simulated update, simulated state of the defense, known) to the
            expected update of the round and the next state. Before the first round the state is empty. None if the defense has no
            state and its unsent coordinates reveal nothing; `expect` then applies to each round.
    """

    expect: Expect
    learn: Callable[[Update], ChannelFacts] = _learn_nothing
    noise: Callable[[Update], Tensor] = compute_no_noise
    follow: Follow | None = None
    expect_approximate: Expect | None = None

    def expect_update(self, update: Update, known: ChannelFacts, *, approximate: bool) -> Update:
        """Return the expected update after the defense, by `expect_approximate` if `approximate` is set and it is not None."""
        expect = self.expect_approximate if approximate and self.expect_approximate is not None else self.expect
        return expect(update, known)

    def follow_round(self, update: Update, state: ChannelState, known: ChannelFacts) -> tuple[Update, ChannelState]:
        """Return the expected update of a round, and the simulated state after it.

        update: the simulated update of the round before the defense. state: the simulated state before the round, empty at first.
        known: what was learned from the received update of the round.
        If `follow` is None, the expected update is the result of `expect`, and the state is empty.
        """
        return self.follow(update, state, known) if self.follow is not None else (self.expect(update, known), {})


transparent = Channel(lambda update, known: update)
"""Channel of an update without a defense."""


def compose_channels(*channels: Channel) -> Channel:
    """Return the channel (the attacker's model) of a chain of defenses that are applied from left to right.

    Every channel learns from the received update, which is the output of the whole chain. The noise power is the sum of the
    noise powers of all channels. This is only an estimate, since later steps of the chain can shrink or enlarge the noise.
    """

    if not channels:
        return transparent

    def expect(update: Update, known: ChannelFacts, *, approximate: bool = False) -> Update:
        for i, channel in enumerate(channels):
            update = channel.expect_update(update, _select_own(known, i), approximate=approximate)
        return update

    def follow(update: Update, state: ChannelState, known: ChannelFacts) -> tuple[Update, ChannelState]:
        after: dict[str, Tensor] = {}
        for i, channel in enumerate(channels):
            update, own = channel.follow_round(update, _select_own(state, i), _select_own(known, i))
            after |= {f"{i}/{name}": t for name, t in own.items()}
        return update, after

    def learn(received: Update) -> ChannelFacts:
        return {f"{i}/{name}": t for i, channel in enumerate(channels) for name, t in channel.learn(received).items()}

    def compute_noise(received: Update) -> Tensor:
        return torch.stack([channel.noise(received) for channel in channels]).sum()

    return Channel(
        expect,
        learn,
        compute_noise,
        follow=follow if any(channel.follow for channel in channels) else None,
        expect_approximate=partial(expect, approximate=True) if any(channel.expect_approximate for channel in channels) else None,
    )


def _select_own(tensors: Mapping[str, Tensor], i: int) -> dict[str, Tensor]:
    """Return the tensors of the i-th channel of a chain, whose names begin with "{i}/", by their names without this prefix."""
    prefix = f"{i}/"
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
