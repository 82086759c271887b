"""Tasks of a replay on several processes of this machine, each with its own threads; one that dies has its task done again."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from attacker.replay.progress import share_of, words_of
from attacker.replay.tasks import ReplayJob, Task, TaskOutcome, write_failures

RETRIES = 3
"""Times that a task is given to another worker after one has died of it."""
PAYS = 20.0
"""Seconds of work that pay for the start of workers, each of which takes some to import PyTorch."""
PATIENCE = 60.0
"""Seconds that workers have to write their best so far after Ctrl-C."""

Told = Callable[[int, float, str], None]
"""Is called with (number of a task, share of it that is done, a few words)."""


def attacked(job: ReplayJob, tasks: Sequence[Task], count: int, told: Told) -> Iterator[tuple[int, TaskOutcome]]:
    """Numbers of tasks and what became of each, as they end.

    count: of workers. After Ctrl-C, the workers' best so far is written, and KeyboardInterrupt raised once that is done.
    """
    pool = _Pool(job, tasks, min(count, len(tasks)), told)
    try:
        yield from pool.outcomes()
    except KeyboardInterrupt:
        yield from pool.interrupted()
        raise
    except GeneratorExit:  # Ctrl-C came while an outcome was looked at
        list(pool.interrupted())
        raise
    finally:
        pool.kill()


class _Worker:
    """A process, the number of the task that it is at, and a thread that hands on what it says."""

    def __init__(self, job: ReplayJob, said: "SimpleQueue[tuple[_Worker, dict[str, Any] | None]]") -> None:
        self.at: int | None = None
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from attacker.replay.executors.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=environment(job.threads),
            start_new_session=True,  # Ctrl-C reaches it once, from here
            text=True,
        )
        self._give(job.as_json())
        self._listener = threading.Thread(target=self._listen, args=(said,), daemon=True)
        self._listener.start()

    def _listen(self, said: "SimpleQueue[tuple[_Worker, dict[str, Any] | None]]") -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # else it died while it spoke
                said.put((self, json.loads(line)))
        said.put((self, None))

    def begin(self, number: int, task: Task) -> None:
        self.at = number
        self._give(task.as_json())

    def _give(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its end is told by the thread that listens
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Kill it, if it still lives, and let go of all that belongs to it."""
        self._process.kill()
        self._process.wait()
        self._listener.join(timeout=PATIENCE)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._complaints.close()

    def last_words(self) -> str:
        """How it ended, once it has."""
        status = self._process.wait()
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        if status < 0:
            name = signal.Signals(-status).name
            return f"killed by {name}" + (", as a system does that runs out of memory" if name == "SIGKILL" else "")
        return lines[-1] if lines else f"exit status {status}"


class _Pool:
    def __init__(self, job: ReplayJob, tasks: Sequence[Task], count: int, told: Told) -> None:
        self.job, self.tasks, self.told = job, tasks, told
        self.waiting = deque(range(len(tasks)))
        self.died: dict[int, list[str]] = {}
        self.said: SimpleQueue[tuple[_Worker, dict[str, Any] | None]] = SimpleQueue()
        self.workers: list[_Worker] = []
        self.count = count

    def outcomes(self) -> Iterator[tuple[int, TaskOutcome]]:
        while self.waiting or any(worker.at is not None for worker in self.workers):
            self._hire()
            worker, message = self.said.get()
            if message is None:
                yield from self._buried(worker)
            elif "outcome" in message:
                yield self._ended(worker, message)
            elif "progress" in message and worker.at is not None:
                done, most, words = message["progress"]
                self.told(worker.at, share_of(done, most), words_of(done, most, words))

    def _hire(self) -> None:
        """Give each idle worker a task, and replace those that died while there is work for them."""
        while self.waiting and len(self.workers) < self.count:
            self.workers.append(_Worker(self.job, self.said))
            self._assign(self.workers[-1])
        for worker in self.workers:
            if worker.at is None and self.waiting:
                self._assign(worker)

    def _assign(self, worker: _Worker) -> None:
        number = self.waiting.popleft()
        worker.begin(number, self.tasks[number])

    def _ended(self, worker: _Worker, message: dict[str, Any]) -> tuple[int, TaskOutcome]:
        assert worker.at is not None
        number, worker.at = worker.at, None
        notes = [f"a worker died: {reason}; its task was done again" for reason in self.died.get(number, ())]
        return number, TaskOutcome(**{**message["outcome"], "notes": notes})

    def _buried(self, worker: _Worker) -> Iterator[tuple[int, TaskOutcome]]:
        """A worker has died: its task goes to another one, which goes on from the last checkpoint, or has failed."""
        self.workers.remove(worker)
        number, reason = worker.at, worker.last_words()
        worker.end()
        if number is None:
            return
        died = self.died.setdefault(number, [])
        died.append(reason)
        if len(died) <= RETRIES:
            self.waiting.appendleft(number)
            self.told(number, 0.0, f"a worker died: {reason}; its task is done again")
            return
        words = f"its worker died {len(died)} times, at last: {reason}"
        yield number, write_failures(self.job, self.tasks[number], words)

    def interrupted(self) -> Iterator[tuple[int, TaskOutcome]]:
        """What workers have got so far, as they write it down."""
        busy = [worker for worker in self.workers if worker.at is not None]
        for worker in busy:
            worker.interrupt()
        until = time.monotonic() + PATIENCE
        while any(worker.at is not None for worker in busy):
            try:
                worker, message = self.said.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                return
            if message is None:
                worker.at = None
            elif "outcome" in message:
                yield self._ended(worker, message)

    def kill(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers.clear()


def environment(threads: int | None) -> dict[str, str]:
    """That of this process, with its path of modules, and so many threads for whatever counts them."""
    counted = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **counted}


def worth(seconds: float, tasks: int, device: str, threads: int | None) -> int:
    """How many workers to start for so many tasks, which take about so many seconds one after the other; 1 for none."""
    if device.startswith("cuda") or tasks < 2 or seconds < PAYS:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(tasks, cores // (threads or 1)))
