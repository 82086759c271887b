"""Tensors chosen by name: the attacker knows which."""

from collections.abc import Sequence

import torch
from torch import Tensor

from defenses.base import Update
from defenses.channel import Channel, ChannelFacts
from defenses.selection import check_patterns, chosen


def withhold(names: str | Sequence[str]) -> Channel:
    """Nothing of the tensors that are not sent."""
    patterns = check_patterns("withhold", names)

    def expect(update: Update, known: ChannelFacts) -> Update:
        withheld = set(chosen("withhold", patterns, update))
        return {name: torch.zeros_like(t) if name in withheld else t for name, t in update.items()}

    return Channel(expect)


def masked(defense: Channel, names: str | Sequence[str]) -> Channel:
    """The channel of what acts on some tensors, and the others as they are."""
    patterns = check_patterns("masked", names)

    def part(update: Update) -> dict[str, Tensor]:
        return {name: update[name] for name in chosen("masked", patterns, update)}

    return Channel(
        expect=lambda update, known: {**update, **defense.expect(part(update), known)},
        learn=lambda seen: defense.learn(part(seen)),
        noise=lambda seen: defense.noise(part(seen)),
    )
