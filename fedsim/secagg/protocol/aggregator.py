"""The server's part of the protocol: the graph of neighbours, and the sum computed from masked vectors and shares."""

from collections.abc import Collection, Mapping
from random import Random
from typing import NamedTuple

import numpy as np

from fedsim.secagg.protocol import graph, shamir
from fedsim.secagg.protocol.keys import derive_public
from fedsim.secagg.protocol.masks import Words, add_mask, subtract_mask
from fedsim.secagg.protocol.participant import Opened, Publics, Stage, derive_pairwise_seed
from fedsim.secagg.protocol.terms import Agreement


class Lost(RuntimeError):
    """Raised if a round has no sum; the message states the exchange and the reason."""


class Roster(NamedTuple):
    """A member's part of the graph: its own number, and a dict from the numbers of its neighbours to their public keys."""

    number: int
    peers: dict[int, Publics]


class Asked(NamedTuple):
    """Request to a member: the members in the sum and the dropped ones, among its neighbours and itself."""

    summed: list[int]
    dropped: list[int]


class Aggregator:
    """State of one round on the server.

    Each method takes a dict from member number to answer to one exchange, and returns the content of the next exchange. A member
    without an answer has dropped out for the rest of the round. Raises Lost if too few are left.
    """

    def __init__(self, agreement: Agreement, context: str, rng: Random) -> None:
        self.agreement, self._context, self._rng = agreement, context, rng
        self._publics: Mapping[int, Publics] = {}
        self._graph: graph.Graph = {}
        self._shared: frozenset[int] = frozenset()
        self._summed: frozenset[int] = frozenset()
        self._total: Words = np.zeros(0, np.uint32)

    def draw_rosters(self, publics: Mapping[int, Publics]) -> dict[int, Roster]:
        """Process the public keys and draw a graph of the members; return each member's roster, the keys of its neighbours."""
        self._check_enough(publics, "setup")
        keys = [key for both in publics.values() for key in both]
        if len(set(keys)) != len(keys):
            raise Lost(
                "two clients advertised the same public key at exchange 'setup', so one of them may impersonate the other: "
                "the round is lost"
            )
        self._publics = publics
        self._graph = graph.draw_graph(sorted(publics), self.agreement.neighbours, self._rng)
        return {
            member: Roster(member, {peer: publics[peer] for peer in sorted(self._graph[member])}) for member in sorted(publics)
        }

    def route_shares(self, sealed: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
        """Process the encrypted shares, a dict by sender and receiver; return them as a dict by receiver and sender."""
        self._check_enough(sealed, "share")
        self._shared = frozenset(sealed)
        self._check_neighbours(self._shared, "share")
        return {
            member: {peer: sealed[peer][member] for peer in sorted(self._graph[member] & self._shared)}
            for member in sorted(sealed)
        }

    def ask_shares(self, vectors: Mapping[int, Words]) -> dict[int, Asked]:
        """Process the masked vectors (N,); return for each member the members of whose secrets it must reveal shares."""
        self._check_enough(vectors, "collect")
        self._summed = frozenset(vectors)
        self._check_neighbours(self._summed, "collect")
        if not graph.is_connected(self._graph, self._summed):
            raise Lost(
                f"the {len(vectors)} clients that answered at exchange 'collect' are not all connected by masks, so that "
                "the sum of each part would be revealed; raise secure_aggregation.neighbours"
            )
        self._total = np.zeros_like(next(iter(vectors.values())))
        for vector in vectors.values():
            self._total += vector
        dropped = self._shared - self._summed
        return {
            member: Asked(sorted((self._graph[member] | {member}) & self._summed), sorted(self._graph[member] & dropped))
            for member in sorted(vectors)
        }

    def unmask(self, opened: Mapping[int, Opened]) -> Words:
        """Process the revealed shares; return the sum (N,) over all members that sent a vector."""
        self._check_enough(opened, "unmask")
        for member in sorted(self._summed):
            subtract_mask(self._total, self._recover_secret(member, {holder: own.seeds for holder, own in opened.items()}))
        for member in sorted(self._shared - self._summed):
            neighbours = self._graph[member] & self._summed
            if neighbours:  # otherwise no summed vector contains one of its masks
                self._remove_masks(member, self._recover_mask_key(member, opened), neighbours)
        return self._total

    def _remove_masks(self, member: int, key: bytes, neighbours: Collection[int]) -> None:
        """Remove from the sum the pairwise masks of `member`, which sent no vector, and its `neighbours`, which are in the sum.

        key: private mask key of `member`, recovered from shares.
        """
        for peer in sorted(neighbours):
            seed = derive_pairwise_seed(key, self._publics[peer].mask, self._context)
            (subtract_mask if peer < member else add_mask)(self._total, seed)

    def _recover_mask_key(self, member: int, opened: Mapping[int, Opened]) -> bytes:
        key = self._recover_secret(member, {holder: own.keys for holder, own in opened.items()})
        if derive_public(key) != self._publics[member].mask:
            raise Lost(f"the shares at exchange 'unmask' give another key than member {member} advertised")
        return key

    def _recover_secret(self, member: int, given: Mapping[int, Mapping[int, bytes]]) -> bytes:
        shares = {holder: own[member] for holder, own in given.items() if member in own}
        if len(shares) < self.agreement.threshold:
            around = len(self._graph[member]) + 1
            raise Lost(
                f"only {len(shares)} of the {around} clients that hold shares of member {member} answered at exchange "
                f"'unmask', and the threshold is {self.agreement.threshold}: the sum cannot be unmasked"
            )
        try:
            return shamir.combine(shares, self.agreement.threshold)
        except ValueError as error:
            raise Lost(f"member {member} cannot be unmasked at exchange 'unmask': {error}") from None

    def _check_enough(self, answered: Collection[int], stage: Stage) -> None:
        if len(answered) < self.agreement.threshold:
            raise Lost(
                f"only {len(answered)} of {self.agreement.clients} clients answered at exchange '{stage}', and the "
                f"threshold is {self.agreement.threshold}: {_MEANS[stage]}"
            )

    def _check_neighbours(self, left: Collection[int], stage: Stage) -> None:
        """Raise Lost if too few clients answered around some member, since clients then refuse to answer further.

        left: members that answered the exchange `stage`. Too few: a member of `left` and its neighbours in `left` are together
        fewer than the threshold.
        """
        for member in sorted(left):
            near = len((self._graph[member] | {member}) & frozenset(left))
            if near < self.agreement.threshold:
                raise Lost(
                    f"only {near} of the {len(self._graph[member]) + 1} clients that are member {member} or its neighbours "
                    f"answered at exchange '{stage}', and the threshold is {self.agreement.threshold}: {_MEANS[stage]}"
                )


_MEANS: Mapping[Stage, str] = {
    "setup": "no secrets are shared",
    "share": "no update is asked for",
    "collect": "clients refuse to unmask a sum of so few",
    "unmask": "the sum cannot be unmasked",
}
