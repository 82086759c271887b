"""The cohort of a round that is repeated: sums over two cohorts would differ by the updates of those in one of them only."""

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from fedsim.recording.files import write_json
from fedsim.recording.safe_files import read_json
from fedsim.secagg.protocol.aggregator import Lost


class Cohorts:
    """The clients in the last sum that was asked to be unmasked, by pseudonym.

    A server that stops between that and the end of the round asks for the round again. The sum over the same clients tells
    nothing new; over one client fewer, the difference is that client's update. So a repeated round keeps its cohort or is lost.

    path: file that outlives the server; None keeps the cohort in memory.
    Raises ValueError for a damaged file, since the cohort is then unknown.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._turn = path, threading.Lock()
        self._round, self._members = 0, frozenset[str]()
        if path is not None and os.path.lexists(path):
            try:
                found = read_json(path)
                self._round, self._members = int(found["round"]), frozenset(map(str, found["members"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} cannot be read, and a repeated round could have another cohort: {error}") from None

    def admits(self, round: int, member: str) -> bool:
        """Return whether a client may take part in this round, which is False only if the round is repeated without it."""
        return round != self._round or member in self._members

    def keep(self, round: int, members: Iterable[str]) -> None:
        """Write down whose sum is about to be unmasked. Raises Lost if the round was unmasked before with other clients."""
        now = frozenset(members)
        with self._turn:
            if round == self._round and now != self._members:
                away = len(self._members - now)
                raise Lost(
                    f"round {round} may have been summed before with {away} more clients, and the difference of both sums would "
                    "be their updates alone: the round is given up"
                )
            self._round, self._members = round, now
            if self._path is not None:
                write_json(self._path, {"round": round, "members": sorted(now)})
