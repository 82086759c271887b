"""Worker processes without a job: workers that wait for another job on their recording, and one on stand-by for any recording."""

import logging
import time
from collections.abc import Collection

from attacker.service.settings import ServiceSettings
from attacker.service.supervisor.job_worker import JobWorker, MessageQueue, list_shared_gpus

log = logging.getLogger(__name__)

IDLE_SECONDS = 120.0
"""Seconds after which a worker without a job is stopped."""
MAX_TASKS = 200
"""Number of jobs after which a worker is replaced, so that memory it has not freed is released."""
STAND_BY_DELAY_SECONDS = 2.0
"""Seconds without any job after which a spare worker is started; its start would slow down running jobs for some seconds."""
STAND_BY_RETRY_SECONDS = 60.0
"""Seconds until another spare worker is started if the last one could not be started, or died before it had a job."""


class IdleWorkers:
    """The idle workers of a service: workers that have run a job, and at most one on stand-by that has run none.

    size:  maximum number of jobs that run at once, and of busy and idle workers together, without the one on stand-by.
    messages: queue into which all workers put their messages.
    """

    def __init__(self, settings: ServiceSettings, size: int, messages: MessageQueue) -> None:
        self.settings, self.size, self._messages = settings, size, messages
        self._idle: list[JobWorker] = []
        self._ready: JobWorker | None = None
        self._busy_at = self._not_before = time.monotonic()
        self._gpus = list_shared_gpus(settings)

    def take(self, recording: str, busy: Collection[JobWorker]) -> JobWorker:
        """Return a worker for a job on a recording: an idle one of this recording, else the one on stand-by, else a new one.

        In the last two cases, idle workers are stopped first, the longest idle first, until idle and busy workers together are
        fewer than `size`, or none is idle. The worker on stand-by does not count as idle here.
        busy: workers that have a job.
        Raises OSError, among others, if no process can be started.
        """
        for worker in self._idle:
            if worker.recording == recording and worker.is_alive:
                self._idle.remove(worker)
                return worker
        while self._idle and len(self._idle) + len(busy) >= self.size:
            self.end_worker(min(self._idle, key=lambda worker: worker.idle_since))
        ready, self._ready, self._not_before = self._ready, None, 0.0
        if ready is None or not ready.is_alive:
            if ready is not None:
                ready.end()
            ready = self._start_worker(busy)
        ready.recording = recording
        return ready

    def keep(self, worker: JobWorker) -> None:
        """Keep a worker that has finished a job for more jobs on its recording; stop it after `MAX_TASKS` jobs, or if it died."""
        if worker.is_alive and worker.tasks < MAX_TASKS:
            worker.idle_since = time.monotonic()
            self._idle.append(worker)
        else:
            worker.end()

    def end_worker(self, worker: JobWorker) -> None:
        """Stop a worker without a job, or clean up after it if it has died, and no longer offer it."""
        if worker in self._idle:
            self._idle.remove(worker)
        if worker is self._ready:
            log.warning("the worker on stand-by died: %s", worker.explain_end().splitlines()[0])
            self._ready, self._not_before = None, time.monotonic() + STAND_BY_RETRY_SECONDS
        worker.end()

    def maintain(self, busy: Collection[JobWorker]) -> None:
        """Stop workers that have been idle for over `IDLE_SECONDS`, and start one on stand-by if needed. To be called regularly.

        A worker on stand-by is started if the service's setting `stand_by` asks for it, none is on stand-by, no job has run for
        `STAND_BY_DELAY_SECONDS`, and, where workers share the GPUs, a GPU is free. If no GPU is free, or the start fails, the
        next try is `STAND_BY_RETRY_SECONDS` later. The error of a failed start is raised.
        busy: workers that have a job.
        """
        now = time.monotonic()
        for worker in [worker for worker in self._idle if now - worker.idle_since > IDLE_SECONDS]:
            self.end_worker(worker)
        if busy:
            self._busy_at = now
        if (
            self._ready is None
            and self.settings.stand_by
            and now >= max(self._busy_at + STAND_BY_DELAY_SECONDS, self._not_before)
        ):
            self._not_before = now + STAND_BY_RETRY_SECONDS
            if not self._gpus or self._find_free_gpu(busy) is not None:
                self._ready = self._start_worker(busy)

    def end(self) -> None:
        """Stop all idle workers, also the one on stand-by."""
        for worker in [*self._idle, *([self._ready] if self._ready is not None else [])]:
            worker.end()
        self._idle, self._ready = [], None

    def _start_worker(self, busy: Collection[JobWorker]) -> JobWorker:
        scores, gpu = bool(self.settings.truth), self._find_free_gpu(busy)
        return JobWorker(self._messages, threads=self.settings.threads, gpu=gpu, scores=scores)

    def _find_free_gpu(self, busy: Collection[JobWorker]) -> str | None:
        """Return a GPU of `list_shared_gpus` that no idle or busy worker uses; None if all are used, or none is shared."""
        used = {worker.gpu for worker in [*busy, *self._idle]}
        return next((gpu for gpu in self._gpus if gpu not in used), None)
