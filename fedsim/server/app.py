"""The Flower ServerApp, which runs and records a federation and can resume it after the last committed round."""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedsim import models
from fedsim.flower import records
from fedsim.recording.disk_space import DiskFull, check_room, explain_full_disk, is_full_disk
from fedsim.recording.files import append_json_lines, hold_lock, make_private, replace_json_lines
from fedsim.recording.manifest import Manifest
from fedsim.recording.round_metrics import read_metrics
from fedsim.recording.run_check import check_run
from fedsim.recording.selection import RecordSelection
from fedsim.recording.writer import Recorder
from fedsim.secagg.cohorts import Cohorts
from fedsim.secagg.grid import SecureGrid
from fedsim.secagg.protocol.terms import Agreement, check_strategy
from fedsim.secagg.recording import SecureRecording
from fedsim.server import checkpoint
from fedsim.server.attendance import WaitingGrid, wait_for_all
from fedsim.server.checkpoint import ServerCheckpoint
from fedsim.server.outcome import FAILURE_PREFIX, check_end, explain_clearing, find_failures
from fedsim.strategies.averaging import Averaging
from fedsim.strategies.recording_strategy import RecordingStrategy

Evaluate = Callable[[dict[str, Tensor]], dict[str, float]]
RESUME_HINT = "continue later with --resume"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the server.

    folder:   folder of the run. manifest: public facts about the experiment, stored in the recording.
    strategy: returns a new Flower strategy, which the server wraps in a strategy that records.
    evaluate: maps the global weights and buffers (one dict by name) to metrics on held-out data.
    seed:     seed of the initial weights, the choice of clients in each round, the noise of central differential privacy, and the
              graphs of secure aggregation. rounds: number of rounds of the run.
    clients:  number of clients of the federation, all of which must be connected when a round begins. timeout: seconds to wait
              for them before each round, and for their replies.
    wanted:   rounds and clients to record. needs: maps a round to the approximate number of bytes that it writes to disk.
    privacy:  maps a round to the privacy guarantee after it, a dict (`Accounts.make_row`) that is stored with its metrics; None
              to store none.
    secure:   settings of secure aggregation, which the clients have too; None without secure aggregation.
    on_round: called with the metrics of each round as a dict, after the round is committed, and of round 0 before training.
    """

    folder: Path
    manifest: Manifest
    strategy: Callable[[], Strategy]
    evaluate: Evaluate
    seed: int
    rounds: int
    clients: int
    timeout: float
    wanted: RecordSelection
    needs: Callable[[int], int] = lambda number: 0
    privacy: Callable[[int], dict[str, Any]] | None = None
    secure: Agreement | None = None
    on_round: Callable[[dict[str, Any]], None] | None = None


def make_server_app(settings_of: Callable[[Context], ServerSettings]) -> ServerApp:
    """Return a Flower ServerApp that runs a federation with the settings that `settings_of` returns for Flower's context."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = settings_of(context)
        check_run(make_private(settings.folder))
        state = make_private(settings.folder / "state", below=settings.folder)
        with explain_full_disk(settings.folder), hold_lock(state / "lock", below=settings.folder):
            FederationServer(grid, settings).run()

    return app


class FederationServer:
    """One federation on the server, new or resumed.

    A round is committed when the checkpoint (the server's state after it) is written. When a run resumes, what was recorded or
    measured after the last committed round is deleted, and the run continues with the next one.
    Raises ValueError if a file of the run's state is invalid, if the recording in the folder belongs to another experiment or has
    rounds but no checkpoint, or if secure aggregation does not suit the strategy.
    """

    def __init__(self, grid: Grid, settings: ServerSettings) -> None:
        self.grid: Grid = WaitingGrid(grid, settings.clients, patience=settings.timeout)
        self.settings, self._connected = settings, grid
        make_private(settings.folder)
        spec = settings.manifest
        model = models.build(spec.model, spec.data, seed=settings.seed)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        buffers = dict(model.named_buffers()) if spec.training.buffers == "shared" else {}
        self.initial = records.to_arrays({**weights, **buffers})
        self.inner = settings.strategy()
        self.state = settings.folder / "state"
        self.metrics = settings.folder / "metrics.jsonl"
        self.found = ServerCheckpoint.read(self.state)
        self.recorder = self._open(settings.folder / "recording")
        names = frozenset(buffers)
        averaging, wanted = Averaging(self.inner, names), settings.wanted
        if settings.secure is None:
            self.strategy = RecordingStrategy(averaging, self.recorder, wanted=wanted, buffers=names)
            return
        check_strategy(type(self.inner).__name__)
        self.strategy = watching = SecureRecording(averaging, self.recorder, wanted=wanted)
        cohorts = Cohorts(self.state / "cohort.json")
        self.grid = SecureGrid(self.grid, settings.secure, seed=settings.seed, observe=watching.observe, cohorts=cohorts)
        for message in settings.secure.list_warnings():
            logging.getLogger("flwr").warning("%s", message)

    def _open(self, folder: Path) -> Recorder:
        """Return a writer that continues the recording in `folder`, or begins one if there is none.

        Raises ValueError if the recording belongs to another experiment, or if it has rounds but there is no checkpoint.
        """
        if not (folder / "manifest.json").exists():
            return Recorder(folder, self.settings.manifest)
        there, ours = Manifest.read(folder / "manifest.json"), self.settings.manifest
        if replace(there, created="", software={}) != replace(ours, created="", software={}):
            raise ValueError(
                f"{folder} is the recording of another experiment; choose another --out, or clear this one: "
                f"{explain_clearing(self.settings.folder)}"
            )
        recorder = Recorder(folder, there)
        if self.found is None and (rounds := recorder.count_rounds()):
            raise ValueError(
                f"{self.state / checkpoint.CHECKPOINT_FILE} is missing, and {folder} holds {rounds} "
                f"round{'s' * (rounds != 1)}: these can be attacked, but the run cannot be resumed; choose another --out to "
                "start a new run"
            )
        return recorder

    def run(self) -> None:
        """Run all rounds after the last committed one.

        Raises ValueError if the number of clients connected at the beginning is not `settings.clients`, TimeoutError if fewer are
        connected later after `settings.timeout` seconds of waiting, DiskFull if the server's disk lacks space for the next round
        or a client reports that its disk is full, OSError or sqlite3.OperationalError if a write fails because the server's disk
        is full, and EmptyRunError if no client answered in any round or nothing was recorded.
        """
        wait_for_all(self._connected, self.settings.clients)
        arrays, done, attempt = self._restore()
        if self.found is None:
            self._commit(0, attempt, arrays, monotonic())
        for number in range(done + 1, self.settings.rounds + 1):
            started = monotonic()
            check_room(self.settings.folder, self.settings.needs(number), "the next round writes", RESUME_HINT)
            config = ConfigRecord({"attempt": attempt})
            messages = self.strategy.configure_train(number, arrays, config, self.grid)
            replies = list(self.grid.send_and_receive(messages, timeout=self.settings.timeout))
            for reply in replies:
                if reply.has_error() and is_full_disk(reply.error.reason or ""):
                    raise DiskFull(
                        f"the disk of the client on node {reply.metadata.src_node_id} is full; complete rounds are kept: free "
                        "disk space on that client, and continue with --resume"
                    )
            aggregated, _ = self.strategy.aggregate_train(number, replies)
            arrays = arrays if aggregated is None else aggregated
            self._commit(number, attempt, arrays, started)
        log = logging.getLogger("flwr")
        check_end(self.settings.folder, lambda message: log.warning("%s", message))
        if failures := find_failures(self.settings.folder):
            log.warning("%s%s", FAILURE_PREFIX, failures)

    def _restore(self) -> tuple[ArrayRecord, int, int]:
        """Delete what was recorded or measured after the last committed round, and restore the strategy and random generators.

        In a new run, the random generators are seeded instead, and the strategy is left as built.
        Returns the global arrays (weights and buffers), the number of committed rounds, and the number of times that the run was
        started, including this one.
        """
        restored = self.found
        done = restored.round if restored else 0
        self.recorder.roll_back(done)
        # the path may be a link
        for path in (*self.settings.folder.rglob(".*.partial"), *self.recorder.folder.rglob(".*.partial")):
            path.unlink(missing_ok=True)
        if self.metrics.exists():
            rows = read_metrics(self.settings.folder)
            replace_json_lines(self.metrics, *(row for row in rows if restored and row["round"] <= done))
        if restored is None:
            random.seed(self.settings.seed)  # Flower draws each round's clients from this global generator,
            np.random.seed(self.settings.seed)  # and the noise of central differential privacy from this one
            return self.initial, 0, 1
        checkpoint.restore_strategy(self.inner, restored.memory)
        checkpoint.restore_generators(restored.generators)
        self.strategy.pseudonyms |= {int(node): name for node, name in restored.pseudonyms.items()}
        arrays = records.to_arrays(restored.arrays)
        self._write(done, restored.attempt + 1, arrays)
        return arrays, done, restored.attempt + 1

    def _commit(self, number: int, attempt: int, arrays: ArrayRecord, started: float) -> None:
        evaluated = self.settings.evaluate(records.to_tensors(arrays))
        row = {"round": number, **evaluated, **self.strategy.traffic, "seconds": monotonic() - started}
        if number and self.settings.privacy is not None:
            row["privacy"] = self.settings.privacy(number)
        infinite = {key: None for key, value in row.items() if isinstance(value, float) and not isfinite(value)}  # JSON has none
        append_json_lines(self.metrics, row | infinite)
        self._write(number, attempt, arrays)
        if self.settings.on_round is not None:
            self.settings.on_round(row)

    def _write(self, number: int, attempt: int, arrays: ArrayRecord) -> None:
        ServerCheckpoint(
            round=number,
            attempt=attempt,
            arrays=records.to_tensors(arrays),
            memory=checkpoint.read_strategy(self.inner),
            generators=checkpoint.read_generators(),
            pseudonyms={str(node): name for node, name in self.strategy.pseudonyms.items()},
        ).write(self.state)
