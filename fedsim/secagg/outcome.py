"""Outcome of one round of secure aggregation as the server sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedsim.secagg.protocol.masks import Words
from fedsim.secagg.protocol.participant import Publics, Stage
from fedsim.secagg.protocol.quantisation import Revealed


@dataclass
class SecureClient:
    """The server's view of one client, completed exchange by exchange.

    pseudonym: None if it sent none. answered: exchanges that it answered. reason: why it failed; empty if it did not.
    late:      whether it failed because no answer came in time. sealed: sizes in bytes of its encrypted shares.
    up, down:  dicts from exchange to bytes on the wire. num_examples, metrics: unmasked, if clients reveal them.
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
    """One round. seen: clients that were asked, by node id. revealed: the sum; None if the round is lost, with the `reason`."""

    seen: Mapping[int, SecureClient]
    revealed: Revealed | None
    reason: str = ""

    def is_summed(self, node: int) -> bool:
        """Return whether the vector of a client is in the sum."""
        return self.revealed is not None and self.seen[node].words is not None
