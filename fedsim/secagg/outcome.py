"""Outcome of one round of secure aggregation as the server sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedsim.secagg.protocol.masks import Words
from fedsim.secagg.protocol.participant import PublicKeys, Stage
from fedsim.secagg.protocol.quantisation import RevealedSum


@dataclass
class SecureClient:
    """What the server knows of one client in one round, filled in exchange by exchange.

    node:      node id. pseudonym: None if the client sent none. answered: exchanges that it answered with a valid message.
    reason:    why the client failed, or why the round has no sum; otherwise empty. late: whether an answer did not come in time.
    publics:   its public keys. words: its masked vector, uint32 (N,). Both are None before they are received.
    sealed:    sizes in bytes of the encrypted shares that it sent, one per neighbour.
    up, down:  dicts from exchange to the size in bytes of the message's content from the client (up) or to the client (down).
    num_examples, metrics: what the client sent unmasked; None and empty unless `Agreement.reveal` is set.
    """

    node: int
    pseudonym: str | None = None
    answered: tuple[Stage, ...] = ()
    reason: str = ""
    late: bool = False
    publics: PublicKeys | None = None
    sealed: tuple[int, ...] = ()
    words: Words | None = None
    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    num_examples: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SecureRound:
    """Result of one round.

    seen:     dict from node id to what the server knows of the client, for all clients that were asked.
    revealed: what the sum of the updates reveals, such as their mean; None if the round is lost, that is, has no sum.
    reason:   why the round is lost; empty if it is not.
    """

    seen: Mapping[int, SecureClient]
    revealed: RevealedSum | None
    reason: str = ""

    def is_summed(self, node: int) -> bool:
        """Return whether the sum contains the vector of the client with node id `node`; False for all if the round is lost."""
        return self.revealed is not None and self.seen[node].words is not None
