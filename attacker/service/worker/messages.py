"""Messages between service and worker, one per line: tasks to the worker; readiness, progress, and outcomes of tasks back."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from attacker.service.jobs.job import FrozenModel, JobProgress, Result

JobWatch = Callable[[float, str], None]
"""Callback with the share of the job that is done, in [0, 1], and a short text."""
MAX_LINE_BYTES = 4 * 2**20
"""Largest length in bytes of a line that a worker may send."""


class JobTask(FrozenModel):
    """A job as it is sent to a worker.

    job: id of the job. spec: fields of a `JobSpec` or `AuditSpec`. run: folder of the run. truth: folders that scoring may read;
    empty for no scoring.
    lock: file that is locked while the job runs. preview: file for intermediate images.
    audit: path of an audit's result without its suffix, see `audit_files`; other jobs do not use it.
    threads, device, ray, model: see `Replay`.
    """

    job: str
    spec: dict[str, Any]
    run: str
    truth: tuple[str, ...]
    lock: str
    preview: str
    threads: int
    device: str
    ray: str | None = None
    model: str | None = None
    audit: str = ""


class JobOutcome(FrozenModel):
    """The outcome of a job. result: what was finished, also if the job failed or was interrupted.

    error: for the state "failed", the reason, followed by a blank line and a traceback; otherwise None.
    """

    state: Literal["done", "failed", "interrupted"]
    result: Result
    error: Annotated[str, Field(max_length=100_000)] | None = None


class WorkerMessage(FrozenModel):
    """One line from a worker: `ready`, that it accepts jobs; `progress` of its job; or `answer`, the outcome of its job."""

    ready: Literal[True] | None = None
    progress: JobProgress | None = None
    answer: JobOutcome | None = None
