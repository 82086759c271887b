"""Tests of the service with a Ray cluster: jobs survive killed workers, can be cancelled, and leave no process behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import is_alive, wait_until

from attacker.replay.executors.process_usage import list_children
from attacker.service.jobs.job import FINAL_STATES

pytestmark = pytest.mark.ray

TIME_LIMIT = 600.0
"""Time limit in seconds, generous for busy machines; most of the time is the start of Ray."""
ENDLESS = {"recording": "digits", "attack": "inverting_gradients", "arguments": {"steps": 1_000_000}, "null": False}


def descendants(pid: int) -> dict[int, str]:
    """Return the living descendants of a process, with their command lines."""
    found, waiting = dict[int, str](), [pid]
    while waiting:
        for child in list_children(waiting.pop()):
            with suppress(OSError):
                found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                waiting.append(child)
    return found


def at_work(service: int) -> list[int]:
    """Return the process ids of Ray's workers that run a task."""
    return [pid for pid, command in descendants(service).items() if command.startswith("ray::run_remote_task")]


def test_jobs_on_ray_survive_killed_workers_and_can_be_cancelled(root: Path, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("attacker")), "serve", str(root), "--port", "0", "--no-token", "--ray", "local"]
    with (tmp_path / "log").open("w") as log:
        service = subprocess.Popen([*command, "--truth", "own"], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        with httpx.Client(base_url=service.stdout.readline().strip(), timeout=TIME_LIMIT) as client:

            def submitted(**changes: Any) -> Callable[[], dict[str, Any]]:
                id = client.post("/api/v1/jobs", json={**ENDLESS, **changes}).json()["id"]
                return lambda: dict(client.get(f"/api/v1/jobs/{id}").json(), address=f"/api/v1/jobs/{id}")

            job = submitted(arguments={"steps": 150})
            (victim, *_) = wait_until(lambda: at_work(service.pid), "no task was begun", seconds=TIME_LIMIT)
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: job()["state"] in FINAL_STATES, "the job did not end", seconds=TIME_LIMIT)
            assert (job()["state"], job()["attempts"], job()["crashes"]) == ("done", 1, 0), job()["error"]
            (attacked,) = job()["result"]["attacks"]
            assert (attacked["done"], attacked["failed"], job()["result"]["scored"]) == (6, {}, True)

            job = submitted()
            wait_until(lambda: at_work(service.pid), lambda: f"no task of the second job was begun: {job()}", seconds=TIME_LIMIT)
            client.post(f"{job()['address']}/cancel", json={})
            wait_until(lambda: job()["state"] in FINAL_STATES, "the job was not cancelled", seconds=TIME_LIMIT)
            assert job()["state"] == "cancelled"

            submitted(seed=1)
            wait_until(lambda: at_work(service.pid), "no task of the last job was begun", seconds=TIME_LIMIT)
        processes = descendants(service.pid)
        assert any("raylet" in words for words in processes.values())
        service.send_signal(signal.SIGTERM)
        assert service.wait(TIME_LIMIT) == 0
        wait_until(
            lambda: not any(map(is_alive, processes)),
            lambda: f"left behind: {[words for p, words in processes.items() if is_alive(p)]}",
            seconds=TIME_LIMIT,
        )
    finally:
        service.kill()
        service.communicate()
