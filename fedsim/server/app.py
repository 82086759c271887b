"""The Flower ServerApp: an honest training run, recorded."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedsim import models, records
from fedsim.server.strategy import Recording
from fedsim.wire.files import make_private
from fedsim.wire.manifest import Manifest
from fedsim.wire.recorder import Recorder

Evaluate = Callable[[dict[str, Tensor]], dict[str, float]]
CONNECT_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that the server needs.

    folder:   of the run. manifest: the public facts. strategy: makes the strategy that is wrapped.
    evaluate: from weights by name, metrics on held-out data, which the server itself never sees.
    wanted:   rounds to record, None for all. on_round: see `Recording`.
    """

    folder: Path
    manifest: Manifest
    strategy: Callable[[], Strategy]
    evaluate: Evaluate
    seed: int
    rounds: int
    clients: int
    timeout: float
    wanted: frozenset[int] | None = None
    on_round: Callable[[dict[str, Any]], None] | None = None


def make_server_app(settings_of: Callable[[Context], Settings]) -> ServerApp:
    """The server's app."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, settings_of(context))

    return app


def serve(grid: Grid, settings: Settings) -> None:
    """Run the federation from the first round to the last."""
    _wait_for_clients(grid, settings.clients)
    random.seed(settings.seed)  # Flower draws each round's clients from the global generator
    make_private(settings.folder)
    recorder = Recorder(settings.folder / "recording", settings.manifest)
    strategy = Recording(
        settings.strategy(),
        recorder,
        wanted=settings.wanted,
        metrics=settings.folder / "metrics.jsonl",
        on_round=settings.on_round,
    )
    initial = models.build(settings.manifest.model, settings.manifest.data, seed=settings.seed)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord(dict(settings.evaluate(records.to_tensors(arrays))))

    try:
        strategy.start(
            grid,
            records.to_arrays(dict(initial.named_parameters())),
            num_rounds=settings.rounds,
            timeout=settings.timeout,
            train_config=ConfigRecord(),
            evaluate_fn=evaluate,
        )
    finally:
        recorder.close()


def _wait_for_clients(grid: Grid, clients: int) -> None:
    """Raises ValueError where other than `clients` nodes are connected: Flower itself would wait for ever."""
    deadline = monotonic() + CONNECT_SECONDS
    while (nodes := len(list(grid.get_node_ids()))) < clients and monotonic() < deadline:
        sleep(0.5)
    if nodes != clients:
        raise ValueError(
            f"the federation has {nodes} nodes and the experiment clients.count = {clients}; make them equal "
            f'(with flwr run: --federation-config "num-supernodes={clients}")'
        )
