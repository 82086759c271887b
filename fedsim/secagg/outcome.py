"""What a server sees of one round of secure aggregation, exchange by exchange."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedsim.secagg.protocol.masks import Words
from fedsim.secagg.protocol.participant import Publics, Stage
from fedsim.secagg.protocol.quantisation import Revealed


@dataclass
class SecureClient:
    """One client. Filled in as the exchanges go on.

    pseudonym: None where it sent none. answered: the exchanges that it answered. reason: why it answered no more; empty where it
    did. late: whether that is because nothing came in time. sealed: sizes of what it encrypted for its neighbours, in bytes.
    up, down: bytes on the wire, by exchange. num_examples, metrics: in clear, where clients are to reveal them.
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
    """One round. seen: each client that was asked. revealed: None where the round is lost, and `reason` says why."""

    seen: Mapping[int, SecureClient]
    revealed: Revealed | None
    reason: str = ""

    def is_summed(self, node: int) -> bool:
        """Whether the vector of a client is in the sum."""
        return self.revealed is not None and self.seen[node].words is not None
