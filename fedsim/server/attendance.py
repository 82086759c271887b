"""Waiting of the server for its clients, with a time limit. Flower's strategies would wait forever."""

import logging
from collections.abc import Iterable
from time import monotonic, sleep

from flwr.serverapp import Grid

from fedsim.flower.grid import GridWrapper

CONNECT_SECONDS = 60
"""Seconds in which clients can connect when a federation starts."""
POLL_SECONDS = 0.5
"""Seconds between two checks."""


class WaitingGrid(GridWrapper):
    """A Flower grid whose `get_node_ids` waits, for at most `patience` seconds, until at least `clients` nodes are connected.

    It logs a warning when it begins to wait, and raises TimeoutError if clients are still missing at the end.
    """

    def __init__(self, inner: Grid, clients: int, *, patience: float) -> None:
        super().__init__(inner)
        self._clients, self._patience = clients, patience

    def get_node_ids(self) -> Iterable[int]:
        nodes = list(self.inner.get_node_ids())
        return nodes if len(nodes) >= self._clients else self._wait(len(nodes))

    def _wait(self, connected: int) -> list[int]:
        deadline = monotonic() + self._patience
        logging.getLogger("flwr").warning(
            "%d of %d clients are connected; start the others again, they are waited for up to %g seconds",
            connected, self._clients, self._patience,
        )  # fmt: skip
        while len(nodes := list(self.inner.get_node_ids())) < self._clients:
            if monotonic() >= deadline:
                raise TimeoutError(
                    f"only {len(nodes)} of {self._clients} clients are connected after {self._patience:g} seconds; start "
                    "the others again, then continue with --resume"
                )
            sleep(POLL_SECONDS)
        return nodes


def wait_for_all(grid: Grid, clients: int) -> None:
    """Wait for at most `CONNECT_SECONDS` until `clients` nodes are connected, before the server begins or resumes a run.

    Raises ValueError if the number of connected nodes is then not exactly `clients`.
    """
    deadline = monotonic() + CONNECT_SECONDS
    while (nodes := len(list(grid.get_node_ids()))) < clients and monotonic() < deadline:
        sleep(POLL_SECONDS)
    if nodes != clients:
        advice = "start the others and run again" if nodes < clients else "make them equal"
        raise ValueError(
            f"the federation has {nodes} nodes after {CONNECT_SECONDS} seconds at most, and the experiment clients.count = "
            f'{clients}; {advice} (with flwr run: --federation-config "num-supernodes={clients}")'
        )
