"""Run of a sweep: all federations of a grid, in this process or in several, within a time budget."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from time import monotonic, sleep

from attacker.replay.executors.ray_cluster import join_cluster
from attacker.sweep.federations import FederationResult, OutOfTime, measure_federation, read_result
from attacker.sweep.grid import GridFederation, SweepGrid

PARENT_SECONDS = 0.2
"""Seconds between two checks of a worker whether the process that started it still runs."""


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """The progress of a sweep.

    done, total: number of finished federations, federations of earlier runs included, and number of all federations.
    name: name of the federation that was finished last. seconds_left: expected time for the unfinished federations; None if
    unknown.
    """

    done: int
    total: int
    name: str
    seconds_left: float | None


SweepWatch = Callable[[SweepProgress], None]
SweepResults = list[tuple[GridFederation, FederationResult | None]]
"""All federations of a grid, in its order, each with its result; None if it is not finished."""


def _read_results(grid: SweepGrid, out: Path) -> SweepResults:
    """Return the results in the folder `out`. A federation stored with other settings than the grid's counts as unfinished."""
    return [(federation, read_result(grid, federation, out)) for federation in grid.federations]


def run_sweep(
    grid: SweepGrid,
    out: Path,
    *,
    workers: int = 1,
    ray: str | None = None,
    seconds: float = float("inf"),
    watch: SweepWatch = lambda progress: None,
) -> SweepResults:
    """Run every federation that is not finished, and return all results.

    workers: number of processes, each with one federation at a time; with 1, this process runs them.
    ray:     address of a Ray cluster that runs the attacks, of one federation after the other; ignored if several processes run.
    seconds: time budget; no training, attack or null begins after it, and the results of federations that are left are None.
    watch:   called with the progress after each federation that is finished.
    A sweep that was stopped or killed continues where it stopped.
    """
    left = [federation for federation, result in _read_results(grid, out) if result is None]
    total, started, deadline = len(grid.federations), monotonic(), monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    names = _measure_all(grid, left, out, workers=workers, ray=ray, deadline=deadline)
    for finished, name in enumerate(names, start=1):
        pace = (monotonic() - started) / finished
        rest = len(left) - finished
        watch(SweepProgress(done=total - rest, total=total, name=name, seconds_left=pace * rest))
    return _read_results(grid, out)


def _measure_all(
    grid: SweepGrid, unfinished: Sequence[GridFederation], out: Path, *, workers: int, ray: str | None, deadline: float
) -> Iterator[str]:
    """Train and attack the federations in `unfinished`, and yield the name of each when it is finished.

    deadline: value of `time.monotonic` after which no further part begins, see `OutOfTime`. Federations that are then unfinished
              are not yielded.
    """
    if workers > 1 and len(unfinished) > 1:
        yield from _measure_in_processes(grid, unfinished, out, workers, deadline - monotonic())
        return
    with join_cluster(ray):
        for federation in unfinished:
            try:
                measure_federation(grid, federation, out, deadline=deadline, ray=ray)
            except OutOfTime:
                return
            yield federation.name


def _measure_in_processes(
    grid: SweepGrid, unfinished: Sequence[GridFederation], out: Path, workers: int, seconds: float
) -> Iterator[str]:
    """Train and attack federations in processes of one thread each, and yield the name of each when it is finished.

    seconds: time that is left, from now. A time is given to processes instead of a deadline, since their clocks need not agree.
    """
    begun = monotonic()
    queue = list(unfinished)
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_prepare)
    running: dict[Future[bool], str] = {}
    try:
        while queue or running:
            while queue and len(running) < workers:
                rest = seconds - (monotonic() - begun)
                federation = queue.pop(0)
                running[pool.submit(_measure_in_worker, grid, federation, out, rest)] = federation.name
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future)
                if future.result():
                    yield name
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare() -> None:
    """Prepare a worker process: one thread for PyTorch; it exits soon after its parent process, even if the parent is killed."""
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()


def exit_with_parent(parent: int) -> None:
    """End this process soon after the process with the ID `parent` has ended; run in a thread of a worker process."""
    while os.getppid() == parent:
        sleep(PARENT_SECONDS)
    os._exit(1)


def _measure_in_worker(grid: SweepGrid, federation: GridFederation, out: Path, seconds: float) -> bool:
    """Train and attack one federation; return whether it is finished, False if a part was left when the time was over.

    seconds: time, from now, after which no further part begins, see `OutOfTime`; a part that has begun is finished.
    """
    try:
        measure_federation(grid, federation, out, deadline=monotonic() + seconds)
    except OutOfTime:
        return False
    return True
