"""Tests of the worker processes of replays and of the service. The workers here are short scripts, which start fast."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from processes import is_alive, wait_until

from attacker.replay.executors import process_pool, process_usage
from attacker.replay.executors.process_pool import run_tasks
from attacker.replay.executors.worker_process import WorkerProcess
from attacker.replay.tasks import ReplayJob, Task, TaskCase

SECONDS = 60.0
"""Time limit in seconds, generous for busy machines."""
ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"

Start = Callable[..., tuple[WorkerProcess[Any], "SimpleQueue[Any]"]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Function that starts a worker with a program, and returns the worker and the queue of its messages."""
    started: list[WorkerProcess[Any]] = []

    def start(program: str, **options: Any) -> tuple[WorkerProcess[Any], "SimpleQueue[Any]"]:
        messages: SimpleQueue[Any] = SimpleQueue()
        started.append(WorkerProcess(program, messages.put, json.loads, **{"threads": None, **options}))
        return started[-1], messages

    yield start
    for worker in started:
        worker.end()


def test_messages_arrive_in_order_and_the_end_last(start: Start) -> None:
    worker, messages = start(ECHO)
    for number in range(100):
        worker.send_task(json.dumps({"number": number}))
    assert [messages.get(timeout=SECONDS)["number"] for _ in range(100)] == list(range(100))
    assert worker.tasks == 100
    worker.kill()
    assert messages.get(timeout=SECONDS) is None
    assert worker.explain_end().startswith("killed by SIGKILL: its memory was not measured; the kernel ")


@pytest.mark.parametrize("kills", [0, 2, None])
def test_end_of_a_killed_worker_is_explained(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kills: int | None
) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    for folder in (proc, cgroup):
        folder.mkdir()
    monkeypatch.setattr(process_usage, "CGROUP_FOLDER", cgroup)
    with monkeypatch.context() as patch:
        patch.setattr(process_usage, "PROC_FOLDER", proc)
        if kills is not None:
            (proc / "vmstat").write_text("nr_free_pages 5\noom_kill 7\n")
            (cgroup / "memory.events").write_text("low 0\noom_kill 1\noom_group_kill 0\n")
        worker, messages = start(ECHO)
    worker.send_task(json.dumps({"number": 1}))
    messages.get(timeout=SECONDS)
    assert worker.measure_usage().megabytes > 0
    worker.kill()
    assert messages.get(timeout=SECONDS) is None
    monkeypatch.setattr(process_usage, "PROC_FOLDER", proc)
    if kills:
        (proc / "vmstat").write_text(f"oom_kill {7 + kills}\n")
    explained = worker.explain_end(limit=2000)
    assert re.match(r"killed by SIGKILL: it used \d+ MB of at most 2000 MB when it was last measured; the kernel ", explained)
    expected = {
        0: "killed no process for lack of memory in the meantime",
        2: f"killed processes for lack of memory in the meantime ({proc / 'vmstat'} by 2)",
        None: "does not report lack of memory",
    }
    assert explained.endswith(expected[kills])


def test_children_of_other_threads_are_listed_if_one_thread_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tasks = tmp_path / "7" / "task"
    (tasks / "1" / "children").mkdir(parents=True)  # cannot be read, as the file of a thread that has ended
    (tasks / "2").mkdir()
    (tasks / "2" / "children").write_text("11 12 ")
    monkeypatch.setattr(process_usage, "PROC_FOLDER", tmp_path)
    assert process_usage.list_children(7) == [11, 12]
    assert process_usage.list_children(8) == []


@pytest.mark.parametrize("line", ["no json", "x" * 2000])
def test_worker_that_writes_an_invalid_message_is_killed(start: Start, line: str) -> None:
    end = "" if len(line) > 1000 else "\n"
    worker, messages = start(
        f"import sys, time; sys.stdout.write({line + end!r}); sys.stdout.flush(); time.sleep(600)", max_line=1000
    )
    assert messages.get(timeout=SECONDS) is None
    assert "invalid message" in worker.explain_end()
    assert not worker.is_alive


def test_explanation_has_the_reason_and_stderr_of_the_last_task(start: Start) -> None:
    worker, messages = start(
        "import sys\n"
        "for line in sys.stdin:\n"
        "    print('at', line.strip(), file=sys.stderr, flush=True)\n"
        "    print(line, end='', flush=True)\n"
        "    if line.strip() == '2': sys.exit('no room')"
    )
    for task in ("1", "2"):
        worker.send_task(task)
        assert messages.get(timeout=SECONDS) == int(task)
    assert messages.get(timeout=SECONDS) is None
    assert worker.explain_end() == "no room\n\nat 2\nno room"


def test_threads_and_environment_reach_the_worker(start: Start) -> None:
    program = "import json, os, sys; print(json.dumps([os.environ['OMP_NUM_THREADS'], os.environ['SEEN'], sys.argv[1:]]))"
    _, messages = start(program, threads=3, environment={"SEEN": "yes"}, arguments=["a"])
    assert messages.get(timeout=SECONDS) == ["3", "yes", ["a"]]


@pytest.mark.skipif(not Path("/proc").exists(), reason="measures in /proc")
def test_child_processes_are_measured_and_ended_with_the_worker(start: Start) -> None:
    child = "x = bytearray(80_000_000); print('true', flush=True)\nimport time\nwhile True: time.sleep(0)"
    worker, messages = start(
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid, flush=True); p.wait()"
    )
    explained = [messages.get(timeout=SECONDS) for _ in range(2)]
    (pid,) = [one for one in explained if one is not True]
    wait_until(lambda: worker.measure_usage().cpu_seconds >= 0.2)
    assert worker.measure_usage().megabytes > 80
    worker.end()
    wait_until(lambda: not is_alive(pid), "what a worker started outlives it")


def test_task_fails_after_retries_if_workers_write_invalid_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the pool would wait for ever for a worker that writes a line that is not JSON."""
    monkeypatch.setattr(process_pool, "WORKER_PROGRAM", f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); print('no json')")
    job = ReplayJob(recording=str(tmp_path), folder=str(tmp_path), attack="cpl", arguments={}, null=False, seed=0, device="cpu")
    retries: list[str] = []
    task = Task(members=(TaskCase(key="case", rows=((1, "a"),)),))
    ((number, outcome),) = run_tasks(job, [task], 1, lambda number, share, words: retries.append(words))
    assert number == 0
    assert "invalid message" in outcome.failed["case"]
    assert (tmp_path / "starts").read_text() == "x" * (1 + process_pool.MAX_RETRIES)
    assert len(retries) == process_pool.MAX_RETRIES
    assert os.path.exists(tmp_path / "case.failed.json")
