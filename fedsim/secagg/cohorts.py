"""The cohort (set of clients) of a round that is repeated after a crash of the server.

If the cohort changed, the difference of the two sums would reveal the updates of the clients that are in only one sum.
"""

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from fedsim.recording.files import write_json
from fedsim.recording.safe_files import read_json
from fedsim.secagg.protocol.aggregator import RoundLost


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
        """Return whether the client `member` may take part in this round.

        It may not if a cohort without this client was stored for the same round before.
        """
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
