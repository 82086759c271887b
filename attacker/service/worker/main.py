"""Main program of a worker: reads jobs from stdin and writes progress and outcomes to stdout, one JSON document per line."""

import sys
from typing import Any

from attacker.replay.executors.worker_loop import Throttle, Work, WorkerChannel, serve

PROGRESS_SECONDS = 0.5
"""Seconds between two messages about one job."""
MAX_WORDS = 300
"""Largest number of characters of the text in a progress message."""


def main() -> None:
    serve(prepare_work)


def prepare_work(channel: WorkerChannel) -> Work:
    """Return the function that runs one job, given as a line of JSON, and returns a dict with its outcome.

    The modules that every job needs are imported first. If no job is waiting after that, the modules that only some jobs need are
    imported, too.
    """
    from attacker.service.jobs.job import JobProgress
    from attacker.service.worker.execution import import_modules, run_job
    from attacker.service.worker.messages import JobTask

    if channel.is_idle:
        import_modules(scores="scores" in sys.argv[1:])

    def run_task(line: str) -> dict[str, Any]:
        is_due = Throttle(PROGRESS_SECONDS)

        def watch(share: float, message: str) -> None:
            channel.interrupt.raise_again()
            if is_due():
                progress = JobProgress(share=min(1.0, max(0.0, share)), words=message[:MAX_WORDS])
                channel.send_message(progress=progress.model_dump())

        outcome = run_job(JobTask.model_validate_json(line), channel.interrupt, watch)
        return {"answer": outcome.model_dump(mode="json")}

    return run_task
