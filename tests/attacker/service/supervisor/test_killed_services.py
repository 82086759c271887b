"""Test of services and workers that are killed at arbitrary instants: each job is published once. The workers are scripts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import is_alive, wait_until
from publications import list_publications
from scripted_workers import SPEC, journal, program

from attacker.service.jobs.queue import Queue
from attacker.service.settings import ServiceSettings

SLOW_TASK = """
    while task["spec"]["seed"] and not os.path.exists(GO): time.sleep(0.01)  # so that there is always something left to do
    time.sleep(0.05)
    answer()
"""
SERVICES = """
import os, sys, time
from pathlib import Path
from attacker.service.supervisor import job_worker
from attacker.service.supervisor.supervisor import Supervisor
from attacker.service.jobs.queue import Limits, Queue
from attacker.service.settings import ServiceSettings
job_worker.WORKER_PROGRAM = sys.argv[2]
at = Path(sys.argv[1])
for line in sys.stdin:
    service = os.fork()
    if not service:
        queue = Queue(at / "queue.sqlite", Limits(crashes=1000))
        Supervisor(ServiceSettings(root=at / "root", state=at / "state", workers=2), queue).start()
        print(os.getpid(), flush=True)
        time.sleep(600)
    os.waitpid(service, 0)
"""


@pytest.fixture
def services(settings: ServiceSettings, tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Function that starts a service in a new process once the last one has ended, and returns its process id."""
    work = program(tmp_path) + SLOW_TASK.replace("GO", repr(str(tmp_path / "go")))
    launcher = subprocess.Popen(
        [sys.executable, "-c", SERVICES, str(tmp_path), work],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert launcher.stdin is not None
    assert launcher.stdout is not None

    def start() -> int:
        print("next", file=launcher.stdin, flush=True)
        return int(launcher.stdout.readline())

    yield start
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.communicate()


def test_jobs_are_published_once_although_services_and_workers_are_killed(
    services: Callable[[], int], queue: Queue, tmp_path: Path
) -> None:
    """Services and workers are killed at arbitrary instants."""
    jobs = {queue.submit(SPEC.model_copy(update={"seed": later})).id for later in (0, 1) for _ in range(20)}
    for kills in range(3):
        _one_life(services(), kills, queue, tmp_path)
    (tmp_path / "go").touch()
    services()
    wait_until(lambda: queue.count_states()["done"] == len(jobs), queue.count_states)
    finished = {job.id: job for job in queue.list(limit=100)}
    assert list_publications(queue) == {id: job.attempts for id, job in finished.items()}
    assert set(finished) == jobs == {job for _, job, _ in journal(tmp_path)}
    assert max(job.attempts for job in finished.values()) > 1, "somebody was killed at work"
    assert all(job.crashes < job.attempts for job in finished.values())


def _one_life(service: int, kills: int, queue: Queue, tmp_path: Path) -> None:
    """Kill some workers of a running service, and then the service."""
    begun, killed = len(journal(tmp_path)), set[str]()
    wait_until(lambda: len(journal(tmp_path)) > begun, "no worker has begun")
    for _ in range(kills):
        time.sleep(0.17)
        last = journal(tmp_path)[-1][0]
        if last not in killed:
            killed.add(last)
            os.kill(int(last), signal.SIGKILL)
    wait_until(lambda: queue.count_states()["running"] > 0, "no job is under way")
    os.kill(service, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(int(pid)) for pid, *_ in journal(tmp_path)), "a worker ends with its service")
