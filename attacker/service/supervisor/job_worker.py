"""A worker process of the service: runs jobs of one recording, on one GPU where there are several."""

import os
import time
from queue import SimpleQueue

from attacker.replay.executors.worker_process import WorkerProcess
from attacker.service.settings import ServiceSettings
from attacker.service.worker.messages import MAX_LINE, JobTask, WorkerMessage

PROGRAM = "from attacker.service.worker.main import main; main()"

Heard = SimpleQueue[tuple["JobWorker | None", WorkerMessage | None]]
"""What workers say: (worker, message), (worker, None) when it has died; (None, None) only wakes who waits."""


class JobWorker(WorkerProcess[WorkerMessage]):
    """A process that runs jobs, one at a time.

    recording: the only one whose jobs it runs, set by its first job. Recordings are not trusted: what one may do to the process
    that reads it must not reach another one. gpu: the only one that it sees. scores: whether it will read truth.
    """

    def __init__(self, heard: Heard, *, threads: int, gpu: str | None = None, scores: bool = True) -> None:
        self.recording: str | None = None
        self.gpu, self.ready = gpu, False
        self.idle_since = time.monotonic()
        super().__init__(
            PROGRAM,
            lambda message: heard.put((self, message)),
            WorkerMessage.model_validate_json,
            threads=threads,
            arguments=["scores"] if scores else [],
            environment={} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu},
            max_line=MAX_LINE,
        )

    def begin(self, task: JobTask) -> None:
        """Hand it a job."""
        self.give(task.as_json())


def shared_gpus(settings: ServiceSettings) -> list[str]:
    """Return the GPUs that are distributed among workers; none where the user named a device, or works on the CPU."""
    if settings.device != "cuda":
        return []
    import torch

    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",") if seen else [str(gpu) for gpu in range(torch.cuda.device_count())]
