"""Handle of a worker process of the service, and the list of GPUs that workers share."""

import os
import time
from queue import SimpleQueue

from attacker.replay.executors.worker_process import WorkerProcess
from attacker.service.settings import ServiceSettings
from attacker.service.worker.messages import MAX_LINE_BYTES, JobTask, WorkerMessage

WORKER_PROGRAM = "from attacker.service.worker.main import main; main()"

MessageQueue = SimpleQueue[tuple["JobWorker | None", WorkerMessage | None]]
"""Messages of workers: (worker, message), or (worker, None) when it has died; (None, None) only wakes the waiting thread."""


class JobWorker(WorkerProcess[WorkerMessage]):
    """The parent's handle of a worker process that runs one job at a time, all on the same recording.

    A worker is not used for a second recording: recordings are not trusted, and a recording whose files took over the process
    must not reach another recording.
    recording: id of the recording, set when the worker gets its first job. ready: whether it has reported that it accepts jobs.
    gpu: the only GPU that the process sees; None if it sees all. scores: whether the process loads the modules for scoring at its
    start.
    """

    def __init__(self, messages: MessageQueue, *, threads: int, gpu: str | None = None, scores: bool = True) -> None:
        self.recording: str | None = None
        self.gpu, self.ready = gpu, False
        self.idle_since = time.monotonic()
        super().__init__(
            WORKER_PROGRAM,
            lambda message: messages.put((self, message)),
            WorkerMessage.model_validate_json,
            threads=threads,
            arguments=["scores"] if scores else [],
            environment={} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu},
            max_line=MAX_LINE_BYTES,
        )

    def start_job(self, task: JobTask) -> None:
        """Send a job to the worker process. Nothing happens if it has died."""
        self.send_task(task.model_dump_json())


def list_shared_gpus(settings: ServiceSettings) -> list[str]:
    """Return the GPUs of which each worker gets one, as texts for CUDA_VISIBLE_DEVICES.

    They are all visible GPUs if the setting `device` is "cuda". For any other device, such as "cpu" or "cuda:1", the list is
    empty.
    """
    if settings.device != "cuda":
        return []
    import torch

    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",") if seen else [str(gpu) for gpu in range(torch.cuda.device_count())]
