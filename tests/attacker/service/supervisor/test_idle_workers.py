"""Tests of idle workers: one is on stand-by before a job arrives, and each serves one recording. The workers are scripts."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
from processes import is_alive, wait_until

from attacker.replay.executors.process_usage import list_children
from attacker.service.settings import ServiceSettings
from attacker.service.supervisor import idle_workers, job_worker
from attacker.service.supervisor.idle_workers import IdleWorkers
from attacker.service.supervisor.job_worker import JobWorker

WAITS = "import sys; sys.stdin.read()"
DIES = "import sys; sys.exit('no memory')"


@pytest.fixture
def make_idle_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., IdleWorkers]]:
    """Function that makes idle workers, which start a worker on stand-by after 0.1 seconds without jobs."""
    monkeypatch.setattr(idle_workers, "STAND_BY_DELAY_SECONDS", 0.1)
    monkeypatch.setattr(job_worker, "WORKER_PROGRAM", WAITS)
    made: list[IdleWorkers] = []

    def make(size: int = 1, **settings: object) -> IdleWorkers:
        made.append(IdleWorkers(ServiceSettings(root=tmp_path, **settings), size, SimpleQueue()))
        return made[-1]

    yield make
    for one in made:
        one.end()


TIME_LIMIT = 60.0
"""Time limit in seconds, generous for busy machines."""


def tend(idle: IdleWorkers, busy: list[JobWorker], seconds: float = 0.3) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        idle.maintain(busy)
        time.sleep(0.02)


def stand_by(idle: IdleWorkers) -> None:
    """Maintain the idle workers until one is on stand-by."""
    wait_until(lambda: idle.maintain([]) or idle._ready)


def workers() -> set[int]:
    """Return the ids of living child processes."""
    return {pid for pid in list_children(os.getpid()) if is_alive(pid)}


def test_first_job_gets_a_worker_started_in_advance(make_idle_workers: Callable[..., IdleWorkers]) -> None:
    idle, before = make_idle_workers(), workers()
    stand_by(idle)
    (waiting,) = workers() - before
    worker = idle.take("photos", [])
    assert (worker.pid, worker.recording) == (waiting, "photos")
    worker.end()


def test_next_worker_is_started_when_no_job_runs(make_idle_workers: Callable[..., IdleWorkers]) -> None:
    idle, before = make_idle_workers(), workers()
    stand_by(idle)
    worker = idle.take("photos", [])
    tend(idle, [worker])
    assert workers() - before == {worker.pid}
    idle.keep(worker)
    stand_by(idle)
    assert len(workers() - before) == 2
    assert idle.take("photos", []) is worker, "one that knows the recording goes first"
    worker.end()


def test_stand_by_can_be_switched_off(make_idle_workers: Callable[..., IdleWorkers]) -> None:
    idle, before = make_idle_workers(stand_by=False), workers()
    tend(idle, [])
    assert workers() == before
    worker = idle.take("photos", [])
    assert worker.is_alive
    worker.end()


def test_worker_that_dies_on_stand_by_is_not_replaced_until_a_job(
    make_idle_workers: Callable[..., IdleWorkers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_worker, "WORKER_PROGRAM", f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); {DIES}")
    idle = make_idle_workers()
    stand_by(idle)
    worker, message = idle._messages.get(timeout=TIME_LIMIT)  # as the supervisor does
    assert message is None
    assert worker is not None
    idle.end_worker(worker)
    tend(idle, [])
    assert idle._messages.empty()
    assert (tmp_path / "starts").read_text() == "x"
    monkeypatch.setattr(job_worker, "WORKER_PROGRAM", WAITS)
    worker = idle.take("photos", [])
    assert worker.is_alive, "a job gets a worker all the same"
    worker.end()


def test_end_stops_all_idle_workers(make_idle_workers: Callable[..., IdleWorkers]) -> None:
    idle, before = make_idle_workers(), workers()
    stand_by(idle)
    idle.keep(idle.take("photos", []))
    stand_by(idle)
    assert len(workers() - before) == 2
    idle.end()
    assert workers() == before


def test_worker_on_stand_by_imports_scoring_only_if_needed() -> None:
    code = """
import sys
from attacker.service.worker.execution import import_modules
for scores in (False, True):
    import_modules(scores=scores)
    print(*(name in sys.modules for name in ("torch._dynamo", "scipy.optimize", "attacker.scoring.score", "fedsim.truth")))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert found.stdout.splitlines() == ["True True False False", "True True True True"]
