"""What the service and a worker say to each other: a task one way, progress and one outcome the other way, a line each."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from attacker.service.jobs.job import FrozenModel, JobProgress, Result

MAX_LINE = 4 * 2**20
"""Bytes of the longest line that a worker may say."""


@dataclass(frozen=True, kw_only=True)
class JobTask:
    """All that a worker needs to know of a job.

    spec: a `JobSpec`, as JSON. run: folder of the run. truth: folders that scoring may read; none: nothing is scored.
    lock: file that who does the job holds. preview: file for what emerges.
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

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "JobTask":
        fields = json.loads(text)
        return cls(**{**fields, "truth": tuple(fields["truth"])})


class JobOutcome(FrozenModel):
    """How a job ended. error: with state `failed`, the reason in a line, then a traceback where it helps."""

    state: Literal["done", "failed", "interrupted"]
    result: Result
    error: Annotated[str, Field(max_length=100_000)] | None = None


class WorkerMessage(FrozenModel):
    """One line of a worker: that it is ready for tasks, how far it is, or how the job ended."""

    ready: Literal[True] | None = None
    progress: JobProgress | None = None
    answer: JobOutcome | None = None
