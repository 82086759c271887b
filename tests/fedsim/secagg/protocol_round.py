"""A round of secure aggregation without Flower."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsim.secagg.protocol import participant
from fedsim.secagg.protocol.aggregator import Aggregator
from fedsim.secagg.protocol.masks import Words
from fedsim.secagg.protocol.terms import Agreement

CONTEXT = "round 1, attempt 1"
Fails = Mapping[str, Sequence[int]]


def agreed(clients: int, **changes: Any) -> Agreement:
    settings = {"threshold": clients // 2 + 1, "neighbours": 64, "clip": 1.0, "target_range": 2**20, "max_weight": 10}
    return Agreement(clients=clients, **{**settings, **changes})


def draw_client_words(clients: int) -> dict[int, Words]:
    """Return a vector of 50 random 32-bit words for each of a number of clients, counted from 1."""
    rng = np.random.default_rng(0)
    return {i: rng.integers(0, 2**32, 50, dtype=np.uint32) for i in range(1, clients + 1)}


@dataclass
class Round:
    """One round of clients 1, 2, ..., with a vector of words for each. fails: by exchange, clients that stop answering there."""

    agreement: Agreement
    words: Mapping[int, Words]
    fails: Fails = field(default_factory=dict)
    masked: dict[int, Words] = field(default_factory=dict)
    members: dict[int, participant.Participant] = field(default_factory=dict)

    def run(self) -> Words:
        gone: set[int] = set()
        draws = {i: random.Random(f"client {i}").randbytes for i in self.words}
        server = Aggregator(self.agreement, CONTEXT, random.Random(0))
        me = self.members

        def left(stage: str, asked: Any) -> list[int]:
            gone.update(self.fails.get(stage, ()))
            return [i for i in asked if i not in gone]

        for i in left("setup", self.words):
            me[i] = participant.setup(CONTEXT, self.agreement.threshold, draws[i])
        rosters = server.draw_rosters({i: me[i].publics for i in me})
        sealed = {}
        for i in left("share", rosters):
            me[i], sealed[i] = participant.share(me[i], *rosters[i], draws[i])
        given = server.route_shares(sealed)
        for i in left("collect", given):
            me[i], self.masked[i] = participant.mask(participant.receive(me[i], given[i]), self.words[i].copy())
        wanted = server.ask_shares(self.masked)
        opened = {}
        for i in left("unmask", wanted):
            me[i], opened[i] = participant.unmask(me[i], *wanted[i])
        return server.unmask(opened)
