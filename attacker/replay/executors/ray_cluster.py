"""Ray executor of a replay. Workers write reconstructions to the shared folder or, if they cannot see it, send them back."""

import os
import socket
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from attacker.replay.executors import INTERRUPT_SECONDS, MAX_RETRIES
from attacker.replay.results import get_run_folder
from attacker.replay.task_runner import TaskRunner, write_failures
from attacker.replay.tasks import ReplayJob, Task, TaskOutcome
from defenses.registry import references
from fedsim.models.source_code import find_code_to_ship
from fedsim.recording import Recording
from fedsim.recording.files import make_private, write_bytes
from fedsim.recording.index import make_path
from fedsim.recording.index_database import INDEX_FILE, JOURNAL_FILE, MAX_BYTES
from fedsim.recording.safe_files import open_file

Parcel = Mapping[str, bytes]
"""Dict from the name of a file to its content."""


def run_tasks(job: ReplayJob, tasks: Sequence[Task], address: str) -> Generator[tuple[int, TaskOutcome]]:
    """Run tasks on a Ray cluster, and yield each task's index in `tasks` and its outcome when it finishes.

    address: address of a running cluster, or `local`, which starts one on this machine and stops it at the end. If this process
    is connected to a cluster already, this cluster is used instead.
    Ray reports no progress within a task.
    After Ctrl-C, any error, and if the generator is closed before its end, tasks are cancelled: running tasks write their best
    results so far, for which they have `INTERRUPT_SECONDS`. If Ctrl-C came while this generator waited for a task, the outcomes
    of tasks that end in this time are yielded, and then KeyboardInterrupt is raised. In the other cases no more outcomes are
    yielded.
    Raises RuntimeError if no cluster can be reached or started.
    """
    with join_cluster(address):
        yield from _Cluster(replace(job, threads=job.threads or 1), tasks).iterate_outcomes()


@contextmanager
def join_cluster(address: str | None) -> Iterator[None]:
    """Connect this process to a Ray cluster for the duration of a `with` block.

    If the process is already connected to a cluster, that connection is used and stays open after the block.
    address: see `run_tasks`; with None, the block runs without a cluster.
    Raises RuntimeError if no cluster can be reached or started.
    """
    if address is None:
        yield
        return
    import ray

    is_new = not ray.is_initialized()
    if is_new:
        _init_ray(address)
    try:
        yield
    finally:
        if is_new:
            ray.shutdown()


def _init_ray(address: str) -> None:
    import ray

    settings: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        settings["include_dashboard"] = False
    elif references.list_admitted():
        settings["runtime_env"] = _describe_foreign_code()
    try:
        _check_address(address)
        for left in reversed(range(CONNECT_TRIES if address == "local" else 1)):
            try:
                ray.init(**settings)
                return
            except Exception:  # on a busy machine, Ray's own timeout of thirty seconds is too short
                ray.shutdown()
                if not left:
                    raise
    except Exception as error:  # Ray raises exceptions of many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        advice = "try again when this machine is less busy" if address == "local" else "--ray local starts one on this machine"
        raise RuntimeError(f"no Ray cluster at {address!r} (the reason: {reason}); {advice}") from None


def _describe_foreign_code() -> dict[str, Any]:
    """Return Ray's `runtime_env` that ships the admitted modules of the user, and their names in `CODE_VARIABLE`, to workers."""
    names = references.list_admitted()
    modules = [import_module(name.partition(":")[0]) for name in names]
    return {"py_modules": list(map(str, find_code_to_ship(modules))), "env_vars": {references.CODE_VARIABLE: ",".join(names)}}


CONNECT_TRIES = 3
"""Number of attempts to start a local cluster."""


def _check_address(address: str) -> None:
    """Raise OSError if HOST:PORT does not answer within ten seconds, since Ray would try for minutes; skip other addresses."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


class _Cluster:
    def __init__(self, job: ReplayJob, tasks: Sequence[Task]) -> None:
        import ray

        self.job, self.tasks = job, tasks
        self.recording = Recording(job.recording)
        self.fingerprint = self.recording.compute_fingerprint()
        resources = {"num_cpus": job.threads, **({"num_gpus": 1} if job.device.startswith("cuda") else {})}
        remote: Any = ray.remote
        self._work = remote(max_retries=MAX_RETRIES, **resources)(run_remote_task)
        self.under_way: dict[Any, int] = {}  # numbers of the tasks that were sent, by Ray's reference
        self.cancelled = False

    def _send(self, number: int, parcel: Parcel | None = None) -> None:
        reference = self._work.remote(self.job, self.tasks[number], self.fingerprint, parcel)
        self.under_way[reference] = number

    def iterate_outcomes(self) -> Iterator[tuple[int, TaskOutcome]]:
        import ray

        try:
            for number in range(len(self.tasks)):
                self._send(number)
            while self.under_way:
                (ended, *_), _ = ray.wait(list(self.under_way), num_returns=1)
                yield from self._finish_task(ended)
        except KeyboardInterrupt:
            yield from self._cancel_tasks()
            raise
        finally:
            with suppress(Exception):  # after an error, which is raised and matters more than those of cancelling
                list(self._cancel_tasks())

    def _cancel_tasks(self) -> Iterator[tuple[int, TaskOutcome]]:
        """Cancel all tasks that have not ended, and yield the outcomes of those that end within `INTERRUPT_SECONDS`."""
        import ray

        if not self.under_way:
            return
        self.cancelled = True
        for reference in self.under_way:
            ray.cancel(reference)
        ended, late = ray.wait(list(self.under_way), num_returns=len(self.under_way), timeout=INTERRUPT_SECONDS)
        for reference in late:
            del self.under_way[reference]
        for reference in ended:
            yield from self._finish_task(reference)

    def _finish_task(self, reference: Any) -> Iterator[tuple[int, TaskOutcome]]:
        """Yield the index and outcome of a task that Ray reports as finished, after writing the files that its worker sent back.

        If its worker cannot see the recording's files, yield nothing and send the task again with these files, unless tasks are
        cancelled. If Ray reports an error, such as a lost worker, the outcome is that all unfinished cases failed. Nothing is
        yielded for a cancelled task.
        """
        import ray

        number = self.under_way.pop(reference)
        try:
            result = ray.get(reference)
        except ray.exceptions.TaskCancelledError:
            return
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            yield number, write_failures(self.job, self.tasks[number], f"its worker was lost: {lines[-1]}")
            return
        if result is None:
            if not self.cancelled:
                self._send(number, read_parcel(self.recording, self.tasks[number]))
            return
        outcome, files = result
        for name, content in files.items():
            write_bytes(Path(self.job.folder) / Path(name).name, content, below=get_run_folder(Path(self.job.folder)))
        yield number, outcome


def run_remote_task(job: ReplayJob, task: Task, fingerprint: str, parcel: Parcel | None) -> tuple[TaskOutcome, Parcel] | None:
    """Run one task on any machine of a cluster. Return its outcome, and a dict of files to send back; or None.

    Without a parcel, the task reads the recording and writes reconstructions at the paths of the job; the dict is then empty. If
    this machine does not see these folders, nothing is run and None is returned; the caller then sends a parcel. With a parcel,
    the task runs in a temporary folder, and the dict leads from the name of each reconstruction, and of each file with the reason
    of a failure, to its content.

    fingerprint: fingerprint of the caller's recording, to recognise the same recording on this machine.
    parcel: the files of the recording that the task needs, a dict from name to content; None for a first try without them.
    """
    if parcel is None:
        return (TaskRunner(job).run(task), {}) if _can_see_files(job, fingerprint) else None
    with tempfile.TemporaryDirectory(prefix="fedleak-") as temporary:
        recording, folder = Path(temporary) / "recording", make_private(Path(temporary) / "reconstructions")
        for name, content in parcel.items():
            make_private((recording / name).parent)
            (recording / name).write_bytes(content)
        outcome = TaskRunner(replace(job, recording=str(recording), folder=str(folder))).run(task)
        written = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".json")]
        return outcome, {path.name: path.read_bytes() for path in written}


def _can_see_files(job: ReplayJob, fingerprint: str) -> bool:
    """Return whether this machine can read the job's folder of reconstructions, and at its recording's path this recording."""
    if not (Path(job.folder) / "attack.json").is_file():
        return False
    try:
        return Recording(job.recording).compute_fingerprint() == fingerprint
    except (ValueError, OSError):
        return False


def read_parcel(recording: Recording, task: Task) -> Parcel:
    """Return a dict from name to content of the files of a recording that a task needs. Names are paths within the recording."""
    places = {place for member in task.members for place in member.rows}
    names = {make_path(round, name) for round, client in places for name in (client, "global")}
    names |= {"manifest.json", INDEX_FILE, JOURNAL_FILE}
    contents: dict[str, bytes] = {}
    for name in sorted(names):
        if os.path.lexists(recording.folder / name):
            with open_file(recording.folder, name, limit=MAX_BYTES) as file:
                contents[name] = file.readall()
    return contents
