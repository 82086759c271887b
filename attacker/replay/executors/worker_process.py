"""Parent's handle of a worker process: starts it, sends tasks, receives messages, measures and stops it.

The worker runs the loop of `worker_loop`. The process pool of a replay uses this module, and so does the HTTP service.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from attacker.replay.executors.process_usage import Usage, count_oom_kills, describe_kill, measure_usage

Message = TypeVar("Message")

MAX_LINE_BYTES = 64 * 2**20
"""Default limit of the length of a worker's line, in bytes."""
MAX_STDERR_BYTES = 4000
"""Largest number of bytes, at the end of a worker's stderr, that `explain_end` returns."""


class WorkerProcess(Generic[Message]):
    """A process that runs one task at a time: it reads tasks from stdin and writes messages to stdout, one JSON text per line.

    program, arguments: Python source code to run with `python -c`, and its `sys.argv[1:]`.
    on_message:  callback that receives each message, and None once the worker has died. It is called on a thread that only reads
                 messages. A worker that writes an invalid line, or one of more than `max_line` bytes, is killed.
    read:        function that parses a line; raises ValueError if the line is invalid.
    threads:     see `make_environment`. environment: variables in addition to those of this process.
    max_line:    largest length of a line from the worker, in bytes.
    """

    def __init__(
        self,
        program: str,
        on_message: Callable[[Message | None], None],
        read: Callable[[bytes], Message],
        *,
        threads: int | None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        max_line: int = MAX_LINE_BYTES,
    ) -> None:
        self.tasks = 0
        self._on_message, self._read, self._max_line = on_message, read, max_line
        self._nonsense, self._stderr_before = "", 0
        self._megabytes: float | None = None
        self._oom_before = count_oom_kills()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**make_environment(threads), **(environment or {})},
            start_new_session=True,  # Ctrl-C reaches only the parent, which interrupts or ends its workers
        )
        self._listener = threading.Thread(target=self._read_messages, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _read_messages(self) -> None:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline(self._max_line)).endswith(b"\n"):  # otherwise it died while writing
            try:
                message = self._read(line)
            except ValueError:
                break
            self._on_message(message)
        if len(line) == self._max_line or line.endswith(b"\n"):
            self._nonsense = f"it wrote an invalid message: {line[:200]!r}"
        self.kill()
        self._on_message(None)

    def send_task(self, task: str) -> None:
        """Send a task, which must be one line, to the worker. Nothing happens if the worker is dead."""
        self.tasks, self._stderr_before = self.tasks + 1, self._measure_stderr()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the listening thread reports the worker's death
            self._process.stdin.write(task.encode() + b"\n")
            self._process.stdin.flush()

    def _measure_stderr(self) -> int:
        return os.fstat(self._stderr.fileno()).st_size

    def interrupt(self) -> None:
        """Send SIGINT, on which the worker stops its task and sends the best result so far as the outcome."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the worker and its process group at once; `on_message` is then called with None, as after any other death."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def measure_usage(self) -> Usage:
        """Return the memory and processor time of the worker and its descendants, see `Usage`."""
        usage = measure_usage(self.pid)
        self._megabytes = usage.megabytes or self._megabytes  # 0 once it is dead
        return usage

    def end(self) -> None:
        """Kill the worker if it is alive, and close its pipes and files."""
        self.kill()
        self._process.wait()
        self._listener.join(timeout=10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._stderr.close()

    def explain_end(self, limit: float | None = None) -> str:
        """Wait until the worker has exited, and return a text whose first line is the reason.

        After a blank line, the end of its stderr since its last task follows, at most `MAX_STDERR_BYTES`. The stderr is left out
        if the worker wrote an invalid message, or if the stderr is empty or equals the reason.
        limit: the worker's memory limit in megabytes, which the reason mentions if the worker was killed by SIGKILL.
        """
        status = self._process.wait()
        if self._nonsense:
            return self._nonsense
        first = max(self._stderr_before, self._measure_stderr() - MAX_STDERR_BYTES)
        output = os.pread(self._stderr.fileno(), MAX_STDERR_BYTES, first).decode(errors="replace").strip()
        if status >= 0:
            reason = output.splitlines()[-1] if output else f"exit status {status}"
        else:
            name = signal.Signals(-status).name
            known = f": {describe_kill(self._megabytes, limit, self._oom_before)}" if name == "SIGKILL" else ""
            reason = f"killed by {name}{known}"
        return f"{reason}\n\n{output}" if output and output != reason else reason


def make_environment(threads: int | None) -> dict[str, str]:
    """Return the environment variables for a worker: those of this process, and this process's import paths as PYTHONPATH.

    threads: number of PyTorch threads, set as OMP_NUM_THREADS and MKL_NUM_THREADS; None leaves these variables as they are.
    """
    counted = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **counted}
