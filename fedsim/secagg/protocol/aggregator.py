"""The server's part of the protocol: the graph of neighbours, and the sum computed from masked vectors and shares."""

from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from fedsim.secagg.protocol import shamir
from fedsim.secagg.protocol.keys import derive_public
from fedsim.secagg.protocol.masks import Words, add_mask, subtract_mask
from fedsim.secagg.protocol.participant import PublicKeys, RevealedShares, Stage, derive_pairwise_seed
from fedsim.secagg.protocol.terms import Agreement

_MEANS: Mapping[Stage, str] = {
    "setup": "no secrets are shared",
    "share": "no update is asked for",
    "collect": "clients refuse to unmask a sum of so few",
    "unmask": "the sum cannot be unmasked",
}
Graph = Mapping[int, frozenset[int]]
"""Neighbours of each member."""


class RoundLost(RuntimeError):
    """Error for a round of secure aggregation that must end without a sum; the message states why."""


class Roster(NamedTuple):
    """What the server tells a client of the graph: its own number, and a dict from each neighbour's number to its keys."""

    number: int
    peers: dict[int, PublicKeys]


class ShareRequest(NamedTuple):
    """Request to one client for shares that it holds of its own seed and of its neighbours' secrets.

    summed:  numbers of the clients, among this client and its neighbours, whose vectors are in the sum. The server requests a
             share of the seed of each one's own mask.
    dropped: numbers of the neighbours that dropped out after exchange "share" and before they sent a vector. The server requests
             a share of each one's private mask key.
    """

    summed: list[int]
    dropped: list[int]


class Aggregator:
    """State of one round on the server. The clients of the round, its members, are numbered from 1.

    context: name of the round and of the attempt at it, such as "round 3, attempt 1". rng: generator that draws the
    Call the methods `draw_rosters`, `route_shares`, `ask_shares` and `unmask` once each, in this order. Each takes a dict from
    member number to that member's answer to one exchange. The first three return what each member is sent in the next exchange,
    the last one returns the sum. A member without an answer has dropped out for the rest of the round. The methods raise
    RoundLost if the sum cannot be computed, such as with too few answers.
    """

    def __init__(self, agreement: Agreement, context: str, rng: Random) -> None:
        self.agreement, self._context, self._rng = agreement, context, rng
        self._publics: Mapping[int, PublicKeys] = {}
        self._graph: Graph = {}
        self._shared: frozenset[int] = frozenset()
        self._summed: frozenset[int] = frozenset()
        self._total: Words = np.zeros(0, np.uint32)

    def draw_rosters(self, publics: Mapping[int, PublicKeys]) -> dict[int, Roster]:
        """Draw the graph of neighbours, and return for each member its number and its neighbours' public keys."""
        self._check_enough(publics, "setup")
        keys = [key for both in publics.values() for key in both]
        if len(set(keys)) != len(keys):
            raise RoundLost(
                "two clients advertised the same public key at exchange 'setup', so that one may impersonate the other: "
                "the round is lost"
            )
        self._publics = publics
        self._graph = draw_graph(sorted(publics), self.agreement.neighbours, self._rng)
        return {
            member: Roster(member, {peer: publics[peer] for peer in sorted(self._graph[member])}) for member in sorted(publics)
        }

    def route_shares(self, sealed: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
        """Return the encrypted shares, given as {sender: {receiver: shares}}, as {receiver: {sender: shares}}.

        Members that sent no shares have dropped out and are left out, also as receivers.
        """
        self._check_enough(sealed, "share")
        self._shared = frozenset(sealed)
        self._check_neighbours(self._shared, "share")
        return {
            member: {peer: sealed[peer][member] for peer in sorted(self._graph[member] & self._shared)}
            for member in sorted(sealed)
        }

    def ask_shares(self, vectors: Mapping[int, Words]) -> dict[int, ShareRequest]:
        """Add up the masked vectors, each uint32 (N,), and return a dict from member to the shares that it is asked to reveal."""
        self._check_enough(vectors, "collect")
        self._summed = frozenset(vectors)
        self._check_neighbours(self._summed, "collect")
        if not is_connected(self._graph, self._summed):
            raise RoundLost(
                f"the {len(vectors)} clients that answered at exchange 'collect' are not all connected by masks, so that "
                "the sum of each connected part would be revealed; raise secure_aggregation.neighbours"
            )
        self._total = np.zeros_like(next(iter(vectors.values())))
        for vector in vectors.values():
            self._total += vector
        dropped = self._shared - self._summed
        return {
            member: ShareRequest(sorted((self._graph[member] | {member}) & self._summed), sorted(self._graph[member] & dropped))
            for member in sorted(vectors)
        }

    def unmask(self, opened: Mapping[int, RevealedShares]) -> Words:
        """Remove the masks with the revealed shares, and return the sum over all members that sent a vector, uint32 (N,)."""
        self._check_enough(opened, "unmask")
        for member in sorted(self._summed):
            subtract_mask(self._total, self._recover_secret(member, {holder: shares.seeds for holder, shares in opened.items()}))
        for member in sorted(self._shared - self._summed):
            neighbours = self._graph[member] & self._summed
            if neighbours:  # otherwise no summed vector contains one of its masks
                self._remove_masks(member, self._recover_mask_key(member, opened), neighbours)
        return self._total

    def _remove_masks(self, member: int, key: bytes, neighbours: Collection[int]) -> None:
        """Remove from the sum the masks that `member`, which sent no vector, has in common with `neighbours`, which sent one.

        key: private mask key of `member`, recovered from shares.
        """
        for peer in sorted(neighbours):
            seed = derive_pairwise_seed(key, self._publics[peer].mask, self._context)
            (subtract_mask if peer < member else add_mask)(self._total, seed)

    def _recover_mask_key(self, member: int, opened: Mapping[int, RevealedShares]) -> bytes:
        key = self._recover_secret(member, {holder: shares.keys for holder, shares in opened.items()})
        if derive_public(key) != self._publics[member].mask:
            raise RoundLost(
                f"the shares of member {member} that clients revealed at exchange 'unmask' give another key than this member "
                "advertised, so a client sent a wrong share; training continues without this round"
            )
        return key

    def _recover_secret(self, member: int, shares_by_holder: Mapping[int, Mapping[int, bytes]]) -> bytes:
        shares = {holder: shares_held[member] for holder, shares_held in shares_by_holder.items() if member in shares_held}
        if len(shares) < self.agreement.threshold:
            around = len(self._graph[member]) + 1
            raise RoundLost(
                f"only {len(shares)} of the {around} clients that hold shares of member {member} answered at exchange "
                f"'unmask', and the threshold is {self.agreement.threshold}, so that {_MEANS['unmask']}; keep more clients "
                "connected, or lower secure_aggregation.threshold"
            )
        try:
            return shamir.combine(shares, self.agreement.threshold)
        except ValueError as error:
            raise RoundLost(
                f"the masks of member {member} cannot be removed from the sum at exchange 'unmask': {error}; training continues "
                "without this round"
            ) from None

    def _check_enough(self, answered: Collection[int], stage: Stage) -> None:
        if len(answered) < self.agreement.threshold:
            raise RoundLost(
                f"only {len(answered)} of {self.agreement.clients} clients answered at exchange '{stage}', and the "
                f"threshold is {self.agreement.threshold}, so that {_MEANS[stage]}"
            )

    def _check_neighbours(self, present: Collection[int], stage: Stage) -> None:
        """Raise RoundLost if a member in `present` and its neighbours in `present` are fewer than the threshold.

        present: members that answered the exchange `stage`. A member in too small a group would refuse the next exchange.
        """
        for member in sorted(present):
            near = len((self._graph[member] | {member}) & frozenset(present))
            if near < self.agreement.threshold:
                raise RoundLost(
                    f"of the group of {len(self._graph[member]) + 1} clients, member {member} and its neighbours, only {near} "
                    f"answered at exchange '{stage}', and the threshold is {self.agreement.threshold}, so that {_MEANS[stage]}; "
                    "keep more clients connected, or lower secure_aggregation.threshold"
                )


def draw_graph(members: Sequence[int], neighbours: int, rng: Random) -> Graph:
    """Return a random graph, a dict from each member to its neighbours: `neighbours` other members, or all if there are fewer.

    Members are arranged in a circle in random order, and each is linked to the nearest on both sides (Harary graph; Bell et al.
    2020, 3.1). Raises ValueError unless `neighbours` is even and at least 2.
    """
    if neighbours < 2 or neighbours % 2:
        raise ValueError(f"neighbours must be even and at least 2, got {neighbours}")
    if neighbours >= len(members) - 1:
        return {member: frozenset(members) - {member} for member in members}
    circle = rng.sample(list(members), len(members))
    reach = [offset for offset in range(-neighbours // 2, neighbours // 2 + 1) if offset]
    return {member: frozenset(circle[(at + offset) % len(circle)] for offset in reach) for at, member in enumerate(circle)}


def is_connected(graph: Graph, among: Collection[int]) -> bool:
    """Return whether the graph restricted to the members in `among` is connected; true if there are none.

    If it is not, the masks cancel within each component, so that the server would learn one sum per component.
    """
    left = set(among)
    reached = [left.pop()] if left else []
    while reached:
        near = graph[reached.pop()] & left
        left -= near
        reached += near
    return not left
