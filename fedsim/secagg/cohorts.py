"""Clients of a round of secure aggregation: what the server knows of each, the outcome, and the cohort of a repeated round.

A round is repeated after a crash of the server. If its cohort, the set of clients, changed, the difference of the two sums would
reveal the updates of the clients that are in only one sum.
"""

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedsim.recording.files import write_json
from fedsim.recording.safe_files import read_json
from fedsim.secagg.protocol.aggregator import RoundLost
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


class Cohorts:
    """The clients of the last sum that the server was about to unmask, by pseudonym or, for a client without one, by node id.

    A server that crashes after unmasking and before the end of the round repeats the round. The repeated round keeps the cohort
    or is lost (it ends without a sum), because the difference to a sum over one client fewer would reveal that client's update.

    path: file that stores the cohort, so that it survives the server; None keeps it in memory.
    Raises ValueError for a damaged file, since the cohort is then unknown.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._turn = path, threading.Lock()
        self._round, self._members = 0, frozenset[str]()
        if path is not None and os.path.lexists(path):
            try:
                record = read_json(path)
                self._round, self._members = int(record["round"]), frozenset(map(str, record["members"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path} cannot be read, so the cohort of a repeated round is unknown: {error}; restore the file, or start "
                    "a new run"
                ) from None

    def is_admitted(self, round: int, member: str) -> bool:
        """Return whether a client may take part: an earlier cohort of this round, if there was one, must include it."""
        return round != self._round or member in self._members

    def store(self, round: int, members: Iterable[str]) -> None:
        """Store the clients whose sum is about to be unmasked.

        Raises RoundLost if other clients were stored for this round before, since their sum may have been unmasked.
        """
        now = frozenset(members)
        with self._turn:
            if round == self._round and now != self._members:
                away = len(self._members - now)
                raise RoundLost(
                    f"round {round} may have been summed before with {away} more clients, and the difference of both sums "
                    "would reveal their updates: the round is lost, and training continues without it"
                )
            self._round, self._members = round, now
            if self._path is not None:
                write_json(self._path, {"round": round, "members": sorted(now)})
