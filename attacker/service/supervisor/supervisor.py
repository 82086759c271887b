"""Supervisor thread: starts worker processes, gives them waiting jobs, enforces limits, and stores how the jobs end."""

import logging
import secrets
import sqlite3
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue

from attacker.replay.executors.process_usage import count_cores, is_measurable, read_memory_limit
from attacker.service.audit_files import make_audit_base
from attacker.service.jobs.queue import Queue
from attacker.service.jobs.queue_rows import Claim, StaleClaim
from attacker.service.jobs.run_names import make_run_path
from attacker.service.settings import ServiceSettings
from attacker.service.state_folder import claim_folder
from attacker.service.supervisor.idle_workers import IdleWorkers
from attacker.service.supervisor.job_worker import JobWorker, MessageQueue, list_shared_gpus
from attacker.service.supervisor.running_job import RunningJob
from attacker.service.worker.messages import JobTask, WorkerMessage
from attacker.service.worker.preview_files import PARTIAL_SUFFIX, make_preview_path
from fedsim.recording.files import hold_lock, make_private

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
"""Seconds between two checks of the queue and the workers if no message arrives; messages are processed at once."""


class Supervisor:
    """The workers of a service, managed by one thread of its process.

    before_end: callback with the id of a job's recording. It is called when the job's worker has finished or died, just before
                the job's new state is written into the queue. It should look for new results, so that a client that sees the
                job's final state also finds them.
    """

    def __init__(
        self, settings: ServiceSettings, queue: Queue, before_end: Callable[[str], None] = lambda recording: None
    ) -> None:
        self.settings, self.queue = settings, queue
        self.owner = secrets.token_hex(8)
        self._before_end = before_end
        self._messages: MessageQueue = SimpleQueue()
        self._running: dict[JobWorker, RunningJob] = {}
        self._claimed: Claim | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._held = ExitStack()

    @cached_property
    def size(self) -> int:
        """Maximum number of jobs that run at the same time; with 0, jobs only wait."""
        if self.settings.workers is not None:
            return self.settings.workers
        if self.settings.ray is not None:
            return 1
        if self.settings.device.startswith("cuda"):
            return max(1, len(list_shared_gpus(self.settings)))
        return max(1, count_cores() // self.settings.threads)

    @cached_property
    def _megabytes(self) -> float | None:
        """Memory limit of one job in megabytes; None for no limit."""
        return self.settings.limit_job_memory(read_memory_limit() / 1e6 if is_measurable() else None, self.size)

    @cached_property
    def _idle(self) -> IdleWorkers:
        return IdleWorkers(self.settings, self.size, self._messages)

    @property
    def busy(self) -> int:
        """Number of jobs that are running."""
        return len(self._running)

    def start(self) -> None:
        """Put the jobs that a killed service left running back into the queue, and start the thread that gives jobs to workers.

        Of these jobs, those whose cancellation was requested are cancelled. Previews that were left in the state folder are
        deleted. No thread is started if `size` is 0.
        Raises ValueError if another service uses the same state folder, if this folder is not trusted, or if `--job-megabytes` is
        set on a system that does not report how much memory a process uses (no /proc).
        """
        if self.settings.job_megabytes is not None and not is_measurable():
            raise ValueError("--job-megabytes needs a system with /proc, from which the memory of processes is read; omit it")
        state = claim_folder(self.settings.state_folder)
        self._held.enter_context(hold_lock(state / "service.lock"))
        for path in make_private(state / "previews").iterdir():
            path.unlink()
        make_private(state / "locks")
        make_private(state / "audits")
        if again := self.queue.recover(self.owner):
            log.info("%d jobs of a service that was killed are put back into the queue", again)
        if self.size:
            self.queue.add_listener(self._wake)
            self._thread = threading.Thread(target=self._work, name="supervisor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread and all workers. Running jobs return to the queue, to be continued, or are cancelled as requested."""
        self._stopping.set()
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self._held.close()

    def _wake(self) -> None:
        self._messages.put((None, None))

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
                self._watch()
                self._start_waiting()
                self._idle.maintain(self._running)
            except Exception:  # such as a full disk; workers' answers are kept until they can be written
                log.exception("an error in the supervisor, which continues")
                self._stopping.wait(1.0)
        self._end_all()

    def _end_all(self) -> None:
        for worker in self._running:
            worker.end()
        self._idle.end()
        for running in self._running.values():
            if running.end is None:
                running.record_release()
            try:
                running.settle()
            except Exception:  # the next start of the service recovers the job
                log.exception("job %s", running.claim.id)
        if self._claimed is not None:
            with suppress(StaleClaim, sqlite3.Error):  # the next start of the service recovers the job
                self.queue.release(self._claimed)

    def _listen(self) -> None:
        """Process all messages of workers, and write into the queue how jobs have ended.

        The first message is waited for, up to `POLL_SECONDS`.
        """
        try:
            worker, message = self._messages.get(timeout=POLL_SECONDS)
            while True:
                if worker is not None:
                    self._handle_message(worker, message)
                worker, message = self._messages.get_nowait()
        except Empty:
            pass
        for running in [running for running in self._running.values() if running.end is not None]:
            self._scan_recording(running.claim.spec.recording)
            running.settle()
            self._finish_job(running)

    def _scan_recording(self, recording: str) -> None:
        try:
            self._before_end(recording)
        except Exception:  # the job has ended even if the scan fails
            log.exception("scanning recording %s failed", recording)

    def _handle_message(self, worker: JobWorker, message: WorkerMessage | None) -> None:
        running = self._running.get(worker)
        if message is None:
            if running is not None and running.end is None:
                running.record_death(worker.explain_end(limit=running.megabytes))
            elif running is None:
                self._idle.end_worker(worker)
        elif message.ready:
            worker.ready = True
            if running is not None:
                running.record_start()
        elif running is not None and message.answer is not None:
            running.record_answer(message.answer)
        elif running is not None and message.progress is not None:
            try:
                running.save_progress(message.progress)
            except StaleClaim:
                worker.kill()

    def _finish_job(self, running: RunningJob) -> None:
        """Delete the preview and the lock file of a job that has ended.

        Its worker is stopped if the supervisor interrupted the job, and otherwise kept for further jobs, see `IdleWorkers.keep`.
        """
        worker, claim = running.worker, running.claim
        del self._running[worker]
        preview = make_preview_path(self.settings.state_folder, claim.id)
        for path in (preview, preview.with_suffix(PARTIAL_SUFFIX), self._lock(claim)):
            path.unlink(missing_ok=True)
        if running.stop_reason is None:
            self._idle.keep(worker)
        else:  # the worker may still receive a signal that was sent for this job
            worker.end()

    def _watch(self) -> None:
        cancelled = self.queue.list_cancelled(running.claim for running in self._running.values()) if self._running else set()
        for running in self._running.values():
            running.watch(cancelled=running.claim.id in cancelled)

    def _start_waiting(self) -> None:
        """Give waiting jobs to workers, up to the maximum number of running jobs."""
        while len(self._running) < self.size and (claim := self._claimed or self.queue.claim(self.owner)):
            self._claimed = claim  # if no worker can be started or nothing can be written, it is tried again
            with suppress(StaleClaim):
                self._start_job(claim)
            self._claimed = None

    def _start_job(self, claim: Claim) -> None:
        """Give the job of a claim (the right to run one attempt of a queued job) to a worker.

        The job fails instead if its recording no longer exists. Raises OSError, among others, if no process can be started.
        """
        try:
            task = self._make_task(claim)
        except ValueError as error:
            self.queue.end_failed(claim, str(error))
            return
        worker = self._idle.take(claim.spec.recording, self._running)
        seconds, megabytes = self.settings.longest_job, self._megabytes
        self._running[worker] = RunningJob(self.queue, claim, worker, seconds=seconds, megabytes=megabytes)
        worker.start_job(task)

    def _make_task(self, claim: Claim) -> JobTask:
        """Return the message that tells a worker to run the job of a claim, with the settings of the service.

        Raises ValueError if the folder of the job's recording no longer exists, or a symbolic link has taken its place.
        """
        settings, run = self.settings, make_run_path(self.settings.folder, claim.spec.recording)
        return JobTask(
            job=claim.id,
            spec=claim.spec.model_dump(mode="json"),
            run=str(run),
            truth=tuple(str(folder.absolute()) for folder in settings.list_truth(run)),
            lock=str(self._lock(claim)),
            preview=str(make_preview_path(settings.state_folder, claim.id)),
            threads=settings.threads,
            device=settings.device,
            ray=settings.ray,
            model=settings.model,
            audit=str(make_audit_base(settings.state_folder.absolute(), claim.id)),
        )

    def _lock(self, claim: Claim) -> Path:
        return self.settings.state_folder / "locks" / claim.id
