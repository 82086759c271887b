"""Groups of processes that are started and stopped together, including their child processes."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import SO_REUSEADDR, SOL_SOCKET, socket
from types import FrameType, TracebackType

from fedsim.deployment.commands import FLOWER_ENVIRONMENT

KILL_SECONDS = 6.0
"""Seconds between SIGTERM and SIGKILL."""
NUM_LAST_LINES = 15
RUNNER_NAME = "runner"
"""Name of the process that starts a run and waits until it has finished."""


class ProcessEnded(RuntimeError):
    """Error for a process that exits unexpectedly, or does not answer or exit in time; the message contains its last output."""


class Processes:
    """Processes by name, as a context manager that stops them all at its end, including their child processes.

    logs:        folder in which the output of each process is appended to NAME.log.
    environment: environment variables of all processes, besides those of this process and `FLOWER_ENVIRONMENT`.
    Each process has its own process group. Start processes in the main thread: on Linux, the kernel sends each one SIGTERM (not
    its child processes) when the thread that started it ends, even if this program is killed and the context manager does not
    end.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self.logs = logs
        self.environment = {**os.environ, **FLOWER_ENVIRONMENT, "PATH": _make_path(), **(environment or {})}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._heard: dict[str, int] = {}

    def start(self, name: str, command: Sequence[str], *, cwd: Path, prefix: Sequence[str] = ()) -> None:
        """Start `command` in the folder `cwd`, under `name`. prefix: words before it, which run it as another user, for example.

        Raises FileNotFoundError if there is no such program.
        """
        if shutil.which(command[0], path=self.environment["PATH"]) is None:
            raise FileNotFoundError(f"{command[0]} is not installed; it is part of Flower: pip install 'flwr>=1.41,<1.42'")
        self.logs.mkdir(parents=True, exist_ok=True)
        with self.find_log(name).open("ab") as log:
            self._heard[name] = log.tell()
            self._running[name] = subprocess.Popen(
                [*prefix, *command],
                cwd=cwd,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    def find_log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def read_last_lines(self, name: str) -> str:
        """Return the last `NUM_LAST_LINES` lines of the log of `name` as one text; "" if there is none."""
        path = self.find_log(name)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-NUM_LAST_LINES:])

    def read_new_lines(self, name: str) -> list[str]:
        """Return the complete lines that a process has written since the last call for it, or since its start."""
        with self.find_log(name).open("rb") as log:
            log.seek(self._heard[name])
            complete, newline, _ = log.read().rpartition(b"\n")
        self._heard[name] += len(complete) + len(newline)
        return complete.decode(errors="replace").splitlines()

    def find_status(self, name: str) -> int | None:
        """Return the exit status of a process; None while it runs."""
        return self._running[name].poll()

    def wait(self, name: str, timeout: float) -> int:
        """Wait until a process exits and return its exit status. Raises ProcessEnded if it still runs after `timeout` seconds."""
        try:
            return self._running[name].wait(timeout)
        except subprocess.TimeoutExpired:
            raise ProcessEnded(
                f"the process {name} still runs after {timeout:g} seconds, in which it should have exited; look for the reason "
                f"in the end of its log:\n{self.read_last_lines(name)}"
            ) from None

    def check(self) -> None:
        """Raise ProcessEnded if a process other than `RUNNER_NAME` has exited that `end` did not stop."""
        for name, process in self._running.items():
            if name != RUNNER_NAME and (status := process.poll()) is not None:
                raise ProcessEnded(f"{name} has exited with status {status}\n{self.read_last_lines(name)}")

    def wait_for(self, name: str, healthy: Callable[[], bool], *, timeout: float) -> None:
        """Wait until `healthy()` is True, asking it repeatedly.

        Raises ProcessEnded if the process `name` exits before, or if `healthy()` is still False after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not healthy():
            if (status := self.find_status(name)) is not None:
                raise ProcessEnded(f"{name} has exited with status {status}\n{self.read_last_lines(name)}")
            if time.monotonic() > deadline:
                raise ProcessEnded(f"{name} does not answer after {timeout:g} seconds\n{self.read_last_lines(name)}")
            time.sleep(0.2)

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal `how` to a process and its child processes, and wait until the process exits.

        A process that still runs after `KILL_SECONDS` gets SIGKILL, and so do child processes that are left when it has exited.
        """
        _send_signal(self._running[name], how)
        self._await_end(name)

    def _await_end(self, name: str) -> None:
        process = self._running.pop(name)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)
        _send_signal(process, signal.SIGKILL)
        process.wait()

    def end_all(self) -> None:
        """Stop all processes with SIGTERM. The one that was started first is stopped last, since the others sign off from it.

        Each gets SIGTERM only once, since a second signal would interrupt its cleanup. Processes that still run after
        `KILL_SECONDS` get SIGKILL.
        """
        first, others = list(self._running)[:1], list(self._running)[1:]
        for name in reversed(others):
            _send_signal(self._running[name], signal.SIGTERM)
        for name in others:
            self._await_end(name)
        for name in first:
            self.end(name)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end_all()


@contextmanager
def handle_sigterm() -> Iterator[None]:
    """Raise SystemExit(143) on the first SIGTERM within a `with` block, so that cleanup runs as after Ctrl-C.

    Further SIGTERMs in the block are ignored. In other threads than the main thread, nothing is changed, since Python allows
    signal handlers only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the cleanup
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def find_free_port() -> int:
    """Return a TCP port of 127.0.0.1 that no program uses at the moment."""
    with socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on the TCP port `port` of the address `host` now."""
    with socket() as one:
        one.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError:
            return False
        return True


def _make_path() -> str:
    """Return the value of the environment variable PATH, with the folder of this Python interpreter put first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def _send_signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # the process has ended; macOS raises PermissionError for a group of zombies
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
