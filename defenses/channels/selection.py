"""Channels (the attacker's models) of defenses that act on tensors of chosen names or wrap another defense.

`withhold` and `masked` act on chosen names, which the attacker knows. `in_gradient_units` applies another channel to the update
converted into a gradient, and converts the result back.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from defenses.base import Update
from defenses.channel import Channel, ChannelFacts, ChannelState
from defenses.combinators import to_gradient, to_update
from defenses.selection import check_patterns, choose_names


def withhold(names: str | Sequence[str]) -> Channel:
    """Return the attacker's model of `withhold`: simulated tensors whose names match `names` become zero."""
    patterns = check_patterns("withhold", names)

    def expect(update: Update, known: ChannelFacts) -> Update:
        withheld = set(choose_names("withhold", patterns, update))
        return {name: torch.zeros_like(t) if name in withheld else t for name, t in update.items()}

    return Channel(expect)


def masked(defense: Channel, names: str | Sequence[str]) -> Channel:
    """Return the attacker's model of `masked`: the channel `defense` for tensors whose names match `names`, others unchanged."""
    patterns = check_patterns("masked", names)

    def select_tensors(update: Update) -> dict[str, Tensor]:
        return {name: update[name] for name in choose_names("masked", patterns, update)}

    def expect(update: Update, known: ChannelFacts, *, approximate: bool = False) -> Update:
        return {**update, **defense.expect_update(select_tensors(update), known, approximate=approximate)}

    def follow(update: Update, state: ChannelState, known: ChannelFacts) -> tuple[Update, ChannelState]:
        expected, after = defense.follow_round(select_tensors(update), state, known)
        return {**update, **expected}, after

    return Channel(
        expect,
        learn=lambda received: defense.learn(select_tensors(received)),
        noise=lambda received: defense.noise(select_tensors(received)),
        follow=follow if defense.follow else None,
        expect_approximate=partial(expect, approximate=True) if defense.expect_approximate else None,
    )


def in_gradient_units(defense: Channel, learning_rate: float) -> Channel:
    """Return the attacker's model of `in_gradient_units`: it converts updates into gradients for the channel `defense`, and back.

    defense: the attacker's model of the inner defense. A gradient is update / (-learning_rate).
    """

    def expect(update: Update, known: ChannelFacts, *, approximate: bool = False) -> Update:
        expected = defense.expect_update(to_gradient(update, learning_rate), known, approximate=approximate)
        return to_update(expected, learning_rate)

    def follow(update: Update, state: ChannelState, known: ChannelFacts) -> tuple[Update, ChannelState]:
        expected, after = defense.follow_round(to_gradient(update, learning_rate), state, known)
        return to_update(expected, learning_rate), after

    return Channel(
        expect,
        learn=lambda received: defense.learn(to_gradient(received, learning_rate)),
        noise=lambda received: defense.noise(to_gradient(received, learning_rate)) * learning_rate**2,
        follow=follow if defense.follow else None,
        expect_approximate=partial(expect, approximate=True) if defense.expect_approximate else None,
    )
