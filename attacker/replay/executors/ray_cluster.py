"""Tasks of a replay on a Ray cluster: files appear in the folder of reconstructions, written there or brought back."""

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from attacker.replay.checkpoints import run_of
from attacker.replay.executors import PATIENCE, RETRIES, OnProgress
from attacker.replay.tasks import Bench, ReplayJob, Task, TaskOutcome, write_failures
from defenses._registry import references
from fedsim.models.source_code import find_code_to_ship
from fedsim.recording import Recording
from fedsim.recording.files import make_private, write_bytes
from fedsim.recording.index import path_of
from fedsim.recording.index_database import INDEX, JOURNAL, MAX_BYTES
from fedsim.recording.safe_files import opened

Parcel = Mapping[str, bytes]
"""Files by their names."""


def run_tasks(job: ReplayJob, tasks: Sequence[Task], address: str, told: OnProgress) -> Iterator[tuple[int, TaskOutcome]]:
    """Yield the number of each task and what became of it, as they end.

    address: of a cluster, which is left as it was; or `local`, which starts one on this machine, and ends it.
    After Ctrl-C, the workers' best so far is written, and KeyboardInterrupt raised once that is done.
    Raises RuntimeError where there is no such cluster.
    """
    with joined(address):
        yield from _Cluster(replace(job, threads=job.threads or 1), tasks, told).outcomes()


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Connected to a cluster, see `run_tasks`; where that is so already, nothing is done: several replays can share a connection.

    Raises RuntimeError where there is no such cluster.
    """
    import ray

    mine = not ray.is_initialized()
    if mine:
        _connect(address)
    try:
        yield
    finally:
        if mine:
            ray.shutdown()


def _connect(address: str) -> None:
    import ray

    settings: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        settings["include_dashboard"] = False
    elif references.admitted():
        settings["runtime_env"] = _foreign_code()
    try:
        _knock(address)
        for left in reversed(range(TRIES if address == "local" else 1)):
            try:
                ray.init(**settings)
                return
            except Exception:  # a busy machine: Ray waits thirty seconds for itself, and no longer
                ray.shutdown()
                if not left:
                    raise
    except Exception as error:  # Ray raises plain ones, too
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        mend = "is there less to do on this machine?" if address == "local" else "--ray local starts one on this machine"
        raise RuntimeError(f"no Ray cluster at {address!r}: {first}; {mend}") from None


def _foreign_code() -> dict[str, Any]:
    """Return the runtime environment in which the cluster's workers find the code that was admitted here as `module:function`.

    Workers of a cluster on this machine inherit the environment and need none.
    """
    names = references.admitted()
    modules = [import_module(name.partition(":")[0]) for name in names]
    return {"py_modules": list(map(str, find_code_to_ship(modules))), "env_vars": {references.VARIABLE: ",".join(names)}}


TRIES = 3
"""How often a cluster of this machine's own is started before that is given up."""


def _knock(address: str) -> None:
    """Raises OSError where an address of host and port does not answer: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


class _Cluster:
    def __init__(self, job: ReplayJob, tasks: Sequence[Task], told: OnProgress) -> None:
        import ray

        self.job, self.tasks, self.told = job, tasks, told
        self.recording = Recording(job.recording)
        self.fingerprint = self.recording.fingerprint()
        resources = {"num_cpus": job.threads, **({"num_gpus": 1} if job.device.startswith("cuda") else {})}
        remote: Any = ray.remote
        self._work = remote(max_retries=RETRIES, **resources)(work)
        self.under_way = {self._send(number): number for number in range(len(tasks))}

    def _send(self, number: int, parcel: Parcel | None = None) -> Any:
        return self._work.remote(self.job.as_json(), self.tasks[number].as_json(), self.fingerprint, parcel)

    def outcomes(self) -> Iterator[tuple[int, TaskOutcome]]:
        import ray

        try:
            while self.under_way:
                (ended, *_), _ = ray.wait(list(self.under_way), num_returns=1)
                yield from self._ended(ended)
        except KeyboardInterrupt:
            for reference in self.under_way:
                ray.cancel(reference)
            ended, _ = ray.wait(list(self.under_way), num_returns=len(self.under_way), timeout=PATIENCE)
            for reference in ended:
                yield from self._ended(reference)
            raise

    def _ended(self, reference: Any) -> Iterator[tuple[int, TaskOutcome]]:
        """What became of a task that has ended; one whose worker cannot see the files is sent again, with them."""
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
            self.under_way[self._send(number, parcelled(self.recording, self.tasks[number]))] = number
            return
        outcome, files = result
        for name, content in files.items():
            write_bytes(Path(self.job.folder) / Path(name).name, content, below=run_of(Path(self.job.folder)))
        yield number, TaskOutcome(**outcome)


def work(job: str, task: str, fingerprint: str, parcel: Parcel | None) -> tuple[dict[str, Any], Parcel] | None:
    """Do one task, wherever this runs: what became of it, and the files that it could not put into the folder by itself.

    job, task: as JSON. fingerprint: of the recording. None where this machine sees neither recording nor folder, and was given
    no parcel of what is needed.
    """
    told, mine = ReplayJob.from_json(job), Task.from_json(task)
    if parcel is None:
        if not _sees(told, fingerprint):
            return None
        return asdict(Bench(told).run(mine)), {}
    with tempfile.TemporaryDirectory(prefix="fedleak-") as temporary:
        recording, folder = Path(temporary) / "recording", make_private(Path(temporary) / "reconstructions")
        for name, content in parcel.items():
            make_private((recording / name).parent)
            (recording / name).write_bytes(content)
        outcome = Bench(replace(told, recording=str(recording), folder=str(folder))).run(mine)
        made = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".json")]
        return asdict(outcome), {path.name: path.read_bytes() for path in made}


def _sees(job: ReplayJob, fingerprint: str) -> bool:
    """Whether this machine has the folder, and the recording itself and not another one of its name."""
    if not (Path(job.folder) / "attack.json").is_file():
        return False
    try:
        return Recording(job.recording).fingerprint() == fingerprint
    except (ValueError, OSError):
        return False


def parcelled(recording: Recording, task: Task) -> Parcel:
    """All files of a recording that a task needs."""
    places = {place for member in task.members for place in member.rows}
    names = {path_of(round, name) for round, client in places for name in (client, "global")}
    names |= {"manifest.json", INDEX, JOURNAL}
    found: dict[str, bytes] = {}
    for name in sorted(names):
        if os.path.lexists(recording.folder / name):
            with opened(recording.folder, name, limit=MAX_BYTES) as file:
                found[name] = file.readall()
    return found
