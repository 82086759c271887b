"""Settings of the HTTP service, which shows recordings and runs attacks on them. They are checked once, at its start."""

from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

OWN_TRUTH: Literal["own"] = "own"
JOB_SECONDS = 24 * 3600.0
"""Default time limit of a job in seconds; longer searches are better run by `attacker replay`."""
JOB_MEMORY_SHARE = 0.8
"""Default share of the machine's memory for all running jobs together."""
MIN_JOB_MEGABYTES = 2000
"""Smallest default memory limit of one job in MB; a worker that has only loaded PyTorch takes 800."""
UNMEASURED_REASON = "its tasks run in processes of the cluster, whose time and memory the service cannot measure"


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Settings of the service for the recordings below one folder.

    root:        folder of runs.
    host, port:  address to listen on; port 0 selects a free one.
    token:       whether requests need a token. False is allowed for loopback addresses only: every user and program of this
                 machine can then read all results and start jobs.
    token_file:  file of the token, by default `token` in the folder `state`; created if it is missing.
    certfile, keyfile: TLS certificate and key; both or none.
    truth:       folders of truth (which examples each client trained on), or OWN_TRUTH for each run's own `truth/`. By default
                 none: nothing is scored, and neither originals nor scores are shown.
    rules:       file of the rules that start attacks automatically; None for no rules.
    workers:     maximum number of jobs that run at once, each in its own process; with 0, jobs only wait. None: 1 with `ray`;
                 one per visible GPU with the device "cuda"; 1 with a numbered GPU such as "cuda:0"; otherwise the number of cores
                 divided by `threads`, at least 1.
    threads:     PyTorch threads per worker.
    stand_by:    whether to keep one additional idle worker when no job runs, so that the next job starts at once.
    device, ray, model: as the options of `attacker replay`: the PyTorch device of attacks, the address of a Ray cluster that runs
                 them (or "local" to start one), and `module:function` that builds the recorded network if it is not built in.
    state:       folder of the service's own files, accessible to its owner only; by default `.attacker` below the root.
    adopt_state: whether to accept a state folder that this service did not create, because the user says that it is trustworthy.
    max_queued:  maximum number of waiting jobs.
    job_seconds, job_megabytes: limits of the duration and the memory of one job. None means the default: `JOB_SECONDS`, and a
                 part of the machine's memory, see `limit_job_memory`.
    job_limits:  whether these defaults apply. If False, a job has only the limits given as `job_seconds` or `job_megabytes`.
    max_body:    maximum size of a request's body in bytes.
    every:       seconds between two scans of all folders; runs that are being recorded are looked at more often.
    """

    root: Path
    host: str = "127.0.0.1"
    port: int = 8600
    token: bool = True
    token_file: Path | None = None
    certfile: Path | None = None
    keyfile: Path | None = None
    truth: tuple[Path, ...] | Literal["own"] = ()
    rules: Path | None = None
    workers: int | None = None
    threads: int = 1
    stand_by: bool = True
    device: str = "cpu"
    ray: str | None = None
    model: str | None = None
    state: Path | None = None
    adopt_state: bool = False
    max_queued: int = 1000
    job_seconds: float | None = None
    job_megabytes: int | None = None
    job_limits: bool = True
    max_body: int = 64 * 1024
    every: float = 0.25

    def __post_init__(self) -> None:
        """Check the settings. Raises ValueError for a missing folder or file, a number out of range, or a contradiction.

        The root, the folders of truth, and the files of certificate, key and rules must exist. Contradictions are a certificate
        without its key or a key without its certificate, no token on an address that is not a loopback one, and `job_megabytes`
        with a Ray cluster other than "local".
        """
        if not self.root.is_dir():
            raise ValueError(f"{self.root} is not a folder; give the folder that contains the runs, or create it with mkdir")
        for option, file in (("--certfile", self.certfile), ("--keyfile", self.keyfile), ("--rules", self.rules)):
            if file is not None and not file.is_file():
                raise ValueError(f"{option} {file}: there is no such file")
        if (self.certfile is None) != (self.keyfile is None):
            raise ValueError("TLS needs both --certfile and --keyfile")
        for folder in self.truth if self.truth != OWN_TRUTH else ():
            if not folder.is_dir():
                raise ValueError(f"--truth {folder}: there is no such folder")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port must be between 0 and 65535, got {self.port}")
        if not self.token and not self.is_loopback:
            raise ValueError(
                f"--no-token is allowed only with an address of this machine alone, such as 127.0.0.1, got --host {self.host}; "
                "omit --no-token"
            )
        for option, number, least in (
            ("--threads", self.threads, 1),
            ("--max-queued", self.max_queued, 1),
            ("--workers", self.workers, 0),
        ):
            if number is not None and number < least:
                raise ValueError(f"{option} must be at least {least}, got {number}")
        for option, limit in (("--job-seconds", self.job_seconds), ("--job-megabytes", self.job_megabytes)):
            if limit is not None and not limit > 0:  # `not >` also rejects NaN
                raise ValueError(f"{option} must be positive, got {limit}")
        if self.job_megabytes is not None and not self.measures:
            raise ValueError(
                f"--job-megabytes cannot be applied with --ray {self.ray}: {UNMEASURED_REASON}; use --ray local, or omit "
                "--job-megabytes"
            )

    @cached_property
    def folder(self) -> Path:
        """Absolute path of the root with links resolved. Recordings are looked for below it only."""
        return self.root.resolve()

    @cached_property
    def state_folder(self) -> Path:
        return (self.state or self.root / ".attacker").absolute()

    @cached_property
    def token_path(self) -> Path:
        return (self.token_file or self.state_folder / "token").absolute()

    @cached_property
    def is_loopback(self) -> bool:
        """Whether `host` is "localhost" or a loopback IP address, to which only this machine can connect.

        Other host names are not looked up, and give False.
        """
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def longest_job(self) -> float | None:
        """Time limit of a job in seconds; None for no limit."""
        return self.job_seconds if self.job_seconds is not None or not self.job_limits else JOB_SECONDS

    def limit_job_memory(self, memory: float | None, workers: int) -> float | None:
        """Return the memory limit in megabytes of each of `workers` parallel jobs; None for no limit.

        It is `job_megabytes` if that is set. Otherwise it is an equal part of `JOB_MEMORY_SHARE` of `memory`, but at least
        `MIN_JOB_MEGABYTES`, and never more than the whole share. There is no such default if `job_limits` is False, or if jobs
        run in a Ray cluster other than "local", where their memory cannot be measured.
        memory: memory of the machine in megabytes; None if unknown, which means no default.
        """
        if self.job_megabytes is not None:
            return self.job_megabytes
        if not self.job_limits or not self.measures or memory is None:
            return None
        together = JOB_MEMORY_SHARE * memory
        return min(together, max(together / max(1, workers), MIN_JOB_MEGABYTES))

    @property
    def measures(self) -> bool:
        """Whether a job's time and memory can be measured: it must run in its worker's process and in child processes of it.

        False with a Ray cluster other than "local".
        """
        return self.ray in (None, "local")

    @property
    def scheme(self) -> str:
        return "https" if self.certfile else "http"

    def list_truth(self, run: Path) -> tuple[Path, ...]:
        """Return the folders with clients' true examples that scoring may read for the run in `run`; () for no scoring.

        They are the folders of the setting `truth`. If the setting is "own", the result is the folder `truth` in `run`, or ()
        if there is no such folder or it is a link.
        """
        if self.truth != OWN_TRUTH:
            return self.truth
        of_run = run / "truth"
        return (of_run,) if of_run.is_dir() and not of_run.is_symlink() else ()
