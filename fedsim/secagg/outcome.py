"""Outcome of one round of secure aggregation as the server sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedsim.secagg.protocol.masks import Words
from fedsim.secagg.protocol.participant import Publics, Stage
from fedsim.secagg.protocol.quantisation import Revealed


@dataclass
class SecureClient:
    """What the server knows of one client in one round, filled in exchange by exchange.

    node:      node id. pseudonym: None if the client sent none. answered: exchanges that it answered with a valid message.
    reason:    why the client failed; empty if it did not. late: whether it failed because no answer came in time.
    publics:   its public keys. words: its masked vector. Both are None before they are received.
    sealed:    sizes in bytes of the encrypted shares that it sent.
    up, down:  dicts from exchange to the size in bytes of the message from the client (up) or to the client (down).
    num_examples, metrics: sent unmasked, if clients reveal them (`Agreement.reveal`).
    """

    node: int
    pseudonym: str | None = None
    answered: tuple[Stage, ...] = ()
    reason: str = ""
    late: bool = False
    publics: Publics | None = None
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
    revealed: the decoded sum of the updates; None if the round is lost, that is, if no sum could be computed.
    reason:   why the round is lost; empty if it is not.
    """

    seen: Mapping[int, SecureClient]
    revealed: Revealed | None
    reason: str = ""

    def is_summed(self, node: int) -> bool:
        """Return whether the sum contains the vector of the client with node id `node`; False for all if the round is lost."""
        return self.revealed is not None and self.seen[node].words is not None
