"""A job that a worker runs: its measured time and memory, its limits, and how it ends."""

import logging
import time
from collections.abc import Callable
from functools import partial

from attacker.service.jobs.job import JobProgress, Result
from attacker.service.jobs.queue import Queue
from attacker.service.jobs.queue_rows import Claim, StaleClaim
from attacker.service.supervisor.job_worker import JobWorker
from attacker.service.worker.messages import JobOutcome

log = logging.getLogger(__name__)

SAVE_SECONDS = 60.0
"""Seconds that a worker has to write its best result so far before it is killed."""
PROGRESS_SECONDS = 1.0
"""Seconds between two writes of a job's progress to the queue."""
MEASURE_SECONDS = 0.5
"""Seconds between two measurements of a job's time and memory."""
CANCELLED = "cancelled"


class RunningJob:
    """A job that a worker is running.

    seconds, megabytes: limits of the job; None for none.
    stop_reason: why the supervisor interrupted or killed the worker, "cancelled" after a user's request; None if it did neither.
    end: function that writes into the queue how the job ended, or that it waits again; None until this is known.
    """

    def __init__(self, queue: Queue, claim: Claim, worker: JobWorker, *, seconds: float | None, megabytes: float | None) -> None:
        self.queue, self.claim, self.worker = queue, claim, worker
        self.seconds, self.megabytes = seconds, megabytes
        self.stop_reason: str | None = None
        self.end: Callable[[], object] | None = None
        self._began = time.monotonic() if worker.ready else None
        self._before = self._seen = worker.measure_usage()
        self._measured = self._reported = 0.0
        self._until = float("inf")

    def record_start(self) -> None:
        """Note that the worker, which was still starting, begins the job: its time limit counts from now."""
        self._began = time.monotonic()

    def save_progress(self, progress: JobProgress) -> None:
        """Store the progress at most every `PROGRESS_SECONDS`. Raises StaleClaim if the claim is no longer valid."""
        now = time.monotonic()
        if now - self._reported >= PROGRESS_SECONDS:
            self._reported = now
            self.queue.save_progress(self.claim, progress)

    def record_answer(self, answer: JobOutcome) -> None:
        """Choose from the outcome that the worker reports how the job ends, and set `end`, which `settle` calls later.

        The first rule that applies decides. A job that the worker reports as done is done, even if its interruption was
        requested. If `end` is set already, it stays. A job that the supervisor interrupted (`stop_reason`) is cancelled or
        failed. A job that the worker reports as failed is failed. A job that something else interrupted goes back into the queue.
        """
        self._seen, result = self.worker.measure_usage(), answer.result
        if answer.state == "done":
            self.end = partial(self.queue.publish, self.claim, result, cpu=self._cpu)
        elif self.end is not None:  # the job has already been returned to the queue
            return
        elif self.stop_reason is not None:
            self.end = self._choose_end(result)
        elif answer.state == "failed":
            self.end = partial(self.queue.end_failed, self.claim, answer.error or "", result, cpu=self._cpu)
        else:  # the worker was interrupted by someone other than the supervisor
            self.record_release()

    def record_death(self, reason: str) -> None:
        """Choose how the job ends after its worker died, and set `end`, which `settle` calls later.

        If the supervisor had interrupted or killed the worker (`stop_reason`), the job is cancelled or failed. Otherwise the
        death is counted (`Queue.end_crashed`): the job is cancelled if its cancellation was requested, else set aside if there
        were too many deaths, and else it waits again. reason: what is known about the reason of the death.
        """
        if self.stop_reason is not None:
            self.end = self._choose_end()
        else:
            log.warning("the worker of job %s died: %s", self.claim.id, reason.splitlines()[0])
            self.end = partial(self.queue.end_crashed, self.claim, reason, cpu=self._cpu)

    def record_release(self) -> None:
        """Set `end` so that `settle` puts the job back into the queue, or marks it as cancelled if a user cancelled it."""
        self.end = partial(self.queue.release, self.claim, cpu=self._cpu)

    def _choose_end(self, result: Result | None = None) -> Callable[[], object]:
        if self.stop_reason == CANCELLED:
            return partial(self.queue.end_cancelled, self.claim, result, cpu=self._cpu)
        return partial(self.queue.end_failed, self.claim, self.stop_reason or "", result, cpu=self._cpu)

    @property
    def _cpu(self) -> float:
        """CPU seconds that the worker had spent on this job, without its earlier jobs, at the last measurement."""
        return max(0.0, self._seen.cpu_seconds - self._before.cpu_seconds)

    def settle(self) -> bool:
        """Write into the queue how the job ended, and return True; return False if it has not ended.

        A job that ended is in a final state or waits again. If the claim is no longer valid, nothing is written, and True is
        returned. Raises sqlite3.Error if the queue cannot be written, as with a full disk; `settle` can then be called again.
        """
        if self.end is None:
            return False
        try:
            self.end()
        except StaleClaim as error:
            log.warning("%s", error)
        return True

    def watch(self, *, cancelled: bool) -> None:
        """Interrupt the job if it was cancelled or exceeds its time limit; kill its worker if it exceeds its memory limit.

        An interrupted worker is killed if it does not stop within `SAVE_SECONDS`; a worker that is still starting is killed at
        once instead of interrupted. Nothing happens if the job has ended. cancelled: whether a user has cancelled the job. To be
        called regularly.
        """
        now = time.monotonic()
        if self.end is not None:
            return
        if now - self._measured >= MEASURE_SECONDS:
            self._measured, self._seen = now, self.worker.measure_usage()
            if self.megabytes is not None and self._seen.megabytes > self.megabytes:
                self._kill_too_large(self.megabytes)
        if self.stop_reason is None and cancelled:
            self._ask(CANCELLED, now)
        elif self.stop_reason is None and self.seconds and self._began and now - self._began > self.seconds:
            self._ask(f"it ran longer than {self.seconds:.0f} seconds; its best result so far is kept", now)
        if now > self._until:
            self.worker.kill()

    def _kill_too_large(self, megabytes: float) -> None:
        """Kill the worker, because it uses more memory than the job's limit `megabytes`, and let the job fail.

        If the worker has run other jobs before, their leftovers may be the reason; the job is then repeated in a new worker
        instead. A job that was already interrupted keeps the reason of that interruption.
        """
        if self.stop_reason is None:
            self.stop_reason = f"it took {self._seen.megabytes:.0f} MB of memory, and a job may take {megabytes:.0f}"
            if self.worker.tasks > 1:
                log.info(
                    ("job %s is repeated in a new worker, because the old one also holds memory of earlier jobs: %s"),
                    self.claim.id,
                    self.stop_reason,
                )
                self.record_release()
        self.worker.kill()

    def _ask(self, reason: str, now: float) -> None:
        self.stop_reason, self._until = reason, now + SAVE_SECONDS
        if self.worker.ready:
            self.worker.interrupt()
        else:
            self.worker.kill()
