"""Idle workers: a worker waits before there is a job, and no worker meets two recordings. The workers are scripts here."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from attacker.service.settings import ServiceSettings
from attacker.service.supervisor import idle_workers, job_worker
from attacker.service.supervisor.idle_workers import IdleWorkers
from attacker.service.supervisor.job_worker import JobWorker

WAITS = "import sys; sys.stdin.read()"
DIES = "import sys; sys.exit('no memory')"


@pytest.fixture
def tended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., IdleWorkers]]:
    """Idle workers that counts a tenth of a second as quiet."""
    monkeypatch.setattr(idle_workers, "STAND_BY_DELAY_SECONDS", 0.1)
    monkeypatch.setattr(job_worker, "WORKER_PROGRAM", WAITS)
    made: list[IdleWorkers] = []

    def make(size: int = 1, **settings: object) -> IdleWorkers:
        made.append(IdleWorkers(ServiceSettings(root=tmp_path, **settings), size, SimpleQueue()))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.end()


LONG = 60.0
"""Seconds for what takes one on a machine of one's own."""


def tend(some: IdleWorkers, busy: list[JobWorker], seconds: float = 0.3) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        some.maintain(busy)
        time.sleep(0.02)


def stand_by(some: IdleWorkers) -> None:
    """Tends it until one is on stand-by."""
    until = time.monotonic() + LONG
    while some._ready is None:
        assert time.monotonic() < until
        some.maintain([])
        time.sleep(0.02)


def workers() -> set[int]:
    """Of this process, those that live."""
    found = {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
    return {pid for pid in found if alive(pid)}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_first_job_gets_a_worker_that_was_started_before_it_came(tended: Callable[..., IdleWorkers]) -> None:
    some, before = tended(), workers()
    stand_by(some)
    (waiting,) = workers() - before
    worker = some.take("photos", [])
    assert (worker.pid, worker.recording) == (waiting, "photos")
    worker.end()


def test_another_one_is_put_on_stand_by_only_once_nothing_runs(tended: Callable[..., IdleWorkers]) -> None:
    some, before = tended(), workers()
    stand_by(some)
    worker = some.take("photos", [])
    tend(some, [worker])
    assert workers() - before == {worker.pid}
    some.keep(worker)
    stand_by(some)
    assert len(workers() - before) == 2
    assert some.take("photos", []) is worker, "one that knows the recording goes first"
    worker.end()


def test_no_worker_meets_two_recordings(tended: Callable[..., IdleWorkers]) -> None:
    some, seen = tended(2), dict[int, str]()
    for recording in ("photos", "other", "photos", "third", "other"):
        stand_by(some)
        worker = some.take(recording, [])
        assert seen.setdefault(worker.pid, recording) == worker.recording == recording
        some.keep(worker)


def test_none_is_on_stand_by_where_that_is_not_wanted(tended: Callable[..., IdleWorkers]) -> None:
    some, before = tended(stand_by=False), workers()
    tend(some, [])
    assert workers() == before
    worker = some.take("photos", [])
    assert worker.is_alive
    worker.end()


def test_one_that_dies_while_it_waits_is_not_replaced_again_and_again(
    tended: Callable[..., IdleWorkers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_worker, "WORKER_PROGRAM", f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); {DIES}")
    some = tended()
    stand_by(some)
    worker, said = some._heard.get(timeout=LONG)  # as the supervisor does
    assert said is None
    assert worker is not None
    some.end_worker(worker)
    tend(some, [])
    assert some._heard.empty()
    assert (tmp_path / "starts").read_text() == "x"
    monkeypatch.setattr(job_worker, "WORKER_PROGRAM", WAITS)
    worker = some.take("photos", [])
    assert worker.is_alive, "a job gets a worker all the same"
    worker.end()


def test_all_of_them_end_together(tended: Callable[..., IdleWorkers]) -> None:
    some, before = tended(), workers()
    stand_by(some)
    some.keep(some.take("photos", []))
    stand_by(some)
    assert len(workers() - before) == 2
    some.end()
    assert workers() == before


def test_a_worker_on_stand_by_has_what_jobs_need_and_nothing_of_truth_where_there_is_none() -> None:
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
