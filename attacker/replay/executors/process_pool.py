"""Process pool that runs the tasks of a replay. If a worker dies, its task is retried, at most `MAX_RETRIES` times."""

import json
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from attacker.replay.executors import INTERRUPT_SECONDS, MAX_RETRIES, OnProgress
from attacker.replay.executors.process_usage import count_cores
from attacker.replay.executors.worker_process import WorkerProcess
from attacker.replay.task_runner import write_failures
from attacker.replay.tasks import ReplayJob, Task, TaskOutcome, compute_share, format_progress

WORKER_PROGRAM = "from attacker.replay.executors.replay_worker import main; main()"
MIN_POOL_SECONDS = 20.0
"""Seconds of work from which on workers are started, each of which takes some seconds to import PyTorch."""


def run_tasks(job: ReplayJob, tasks: Sequence[Task], count: int, on_progress: OnProgress) -> Generator[tuple[int, TaskOutcome]]:
    """Run tasks on at most `count` worker processes, and yield each task's index in `tasks` and its outcome when it finishes.

    on_progress: callback that receives the progress of each task.
    After Ctrl-C, the workers have `INTERRUPT_SECONDS` to write their best results so far. If Ctrl-C came while this generator
    waited for a worker, the outcomes of tasks that end in this time are yielded, and then KeyboardInterrupt is raised. If Ctrl-C
    came while the caller handled an outcome, no more outcomes are yielded.
    """
    pool = _Pool(job, tasks, min(count, len(tasks)), on_progress)
    try:
        yield from pool.iterate_outcomes()
    except KeyboardInterrupt:
        yield from pool.interrupt_workers()
        raise
    except GeneratorExit:  # Ctrl-C came while the caller handled an outcome
        list(pool.interrupt_workers())
        raise
    finally:
        pool.kill()


class _Worker(WorkerProcess[dict[str, Any]]):
    """A worker process. at: index of the task that it works on; None while it is idle."""

    def __init__(self, job: ReplayJob, messages: "SimpleQueue[tuple[_Worker, dict[str, Any] | None]]") -> None:
        self.at: int | None = None
        super().__init__(WORKER_PROGRAM, lambda message: messages.put((self, message)), json.loads, threads=job.threads)
        self.send_task(job.to_json())

    def start_task(self, number: int, task: Task) -> None:
        self.at = number
        self.send_task(task.to_json())


class _Pool:
    def __init__(self, job: ReplayJob, tasks: Sequence[Task], count: int, on_progress: OnProgress) -> None:
        self.job, self.tasks, self.on_progress = job, tasks, on_progress
        self.waiting = deque(range(len(tasks)))
        self.died: dict[int, list[str]] = {}
        self.messages: SimpleQueue[tuple[_Worker, dict[str, Any] | None]] = SimpleQueue()
        self.workers: list[_Worker] = []
        self.count = count

    def iterate_outcomes(self) -> Iterator[tuple[int, TaskOutcome]]:
        while self.waiting or any(worker.at is not None for worker in self.workers):
            self._assign_tasks()
            worker, message = self.messages.get()
            if message is None:
                yield from self._requeue_task(worker)
            elif "outcome" in message:
                yield self._finish_task(worker, message)
            elif "progress" in message and worker.at is not None:
                done, total, text = message["progress"]
                self.on_progress(worker.at, compute_share(done, total), format_progress(done, total, text))

    def _assign_tasks(self) -> None:
        """Give waiting tasks to idle workers, and start workers up to `count`, also in place of workers that died."""
        while self.waiting and len(self.workers) < self.count:
            self.workers.append(_Worker(self.job, self.messages))
            self._assign_task(self.workers[-1])
        for worker in self.workers:
            if worker.at is None and self.waiting:
                self._assign_task(worker)

    def _assign_task(self, worker: _Worker) -> None:
        number = self.waiting.popleft()
        worker.start_task(number, self.tasks[number])

    def _finish_task(self, worker: _Worker, message: dict[str, Any]) -> tuple[int, TaskOutcome]:
        assert worker.at is not None
        number, worker.at = worker.at, None
        notes = [f"a worker died: {reason}; its task was repeated" for reason in self.died.get(number, ())]
        return number, TaskOutcome(**{**message["outcome"], "notes": notes})

    def _requeue_task(self, worker: _Worker) -> Iterator[tuple[int, TaskOutcome]]:
        """Queue the task of a dead worker again; it will resume from its checkpoint.

        If more than `MAX_RETRIES` workers died while they ran this task, yield its outcome instead: all unfinished cases failed.
        """
        self.workers.remove(worker)
        number, reason = worker.at, worker.explain_end().splitlines()[0]
        worker.end()
        if number is None:
            return
        died = self.died.setdefault(number, [])
        died.append(reason)
        if len(died) <= MAX_RETRIES:
            self.waiting.appendleft(number)
            self.on_progress(number, 0.0, f"a worker died: {reason}; its task is repeated")
            return
        reason_of_failure = f"its worker died {len(died)} times, the last time because: {reason}"
        yield number, write_failures(self.job, self.tasks[number], reason_of_failure)

    def interrupt_workers(self) -> Iterator[tuple[int, TaskOutcome]]:
        """Send SIGINT to the busy workers, and yield the outcomes of their tasks: the best results so far.

        Workers that die, or do not answer within `INTERRUPT_SECONDS`, yield none.
        """
        busy = [worker for worker in self.workers if worker.at is not None]
        for worker in busy:
            worker.interrupt()
        until = time.monotonic() + INTERRUPT_SECONDS
        while any(worker.at is not None for worker in busy):
            try:
                worker, message = self.messages.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                return
            if message is None:
                worker.at = None
            elif "outcome" in message:
                yield self._finish_task(worker, message)

    def kill(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers.clear()


def choose_workers(seconds: float, tasks: int, device: str, threads: int | None) -> int:
    """Return how many worker processes to start; 1 means that the tasks run in this process.

    It is 1 on a GPU, for a single task, and for less than `MIN_POOL_SECONDS` of work. Otherwise it is the number of cores divided
    by the threads per worker, rounded down, but at least 1 and at most one worker per task.

    seconds: estimated time of all tasks together on one core. tasks: number of tasks. device: PyTorch device of the attack.
    threads: PyTorch threads per worker; None counts as 1.
    """
    if device.startswith("cuda") or tasks < 2 or seconds < MIN_POOL_SECONDS:
        return 1
    return max(1, min(tasks, count_cores() // (threads or 1)))
