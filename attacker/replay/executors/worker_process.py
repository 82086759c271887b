"""A worker process as its parent sees it: spawned, given tasks, listened to, measured, and ended.

Its program is one of `worker_loop`. The process pool of a replay and the supervisor of the service start their workers here.
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

from attacker.replay.executors.process_usage import Usage, describe_kill, oom_kills, usage

Message = TypeVar("Message")

MAX_LINE = 64 * 2**20
"""Bytes of the longest line that a worker may write, unless its owner says otherwise."""
MAX_STDERR = 4000
"""Bytes of a worker's stderr that are kept in `last_words`."""


class WorkerProcess(Generic[Message]):
    """A process that does tasks, one at a time: it reads them from stdin and writes messages to stdout, one JSON document a line.

    program, arguments: Python source, and `sys.argv[1:]` of it.
    heard:       is called, on a thread of its own, with each message, and with None once the worker has died or has written
                 what `read` does not understand, which kills it.
    read:        makes a message of a line; raises ValueError where it is none.
    environment: variables beside those of this process.
    """

    def __init__(
        self,
        program: str,
        heard: Callable[[Message | None], None],
        read: Callable[[bytes], Message],
        *,
        threads: int | None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        max_line: int = MAX_LINE,
    ) -> None:
        self.tasks = 0
        self._heard, self._read, self._max_line = heard, read, max_line
        self._nonsense, self._stderr_before = "", 0
        self._megabytes: float | None = None
        self._oom_before = oom_kills()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**environment_of(threads), **(environment or {})},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which interrupts or ends its workers
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline(self._max_line)).endswith(b"\n"):  # else it died while it wrote
            try:
                message = self._read(line)
            except ValueError:
                break
            self._heard(message)
        if len(line) == self._max_line or line.endswith(b"\n"):
            self._nonsense = f"it said what nobody understands: {line[:200]!r}"
        self.kill()
        self._heard(None)

    def give(self, task: str) -> None:
        """Send a task, as one line of JSON."""
        self.tasks, self._stderr_before = self.tasks + 1, self._stderr_size()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its end is told by the thread that listens
            self._process.stdin.write(task.encode() + b"\n")
            self._process.stdin.flush()

    def _stderr_size(self) -> int:
        return os.fstat(self._stderr.fileno()).st_size

    def interrupt(self) -> None:
        """Have it end its task with the best so far."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill it at once, with what it started in its group; `heard` is told as of any other death."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def usage(self) -> Usage:
        """Memory and processor time of the process and of all that it started."""
        found = usage(self.pid)
        self._megabytes = found.megabytes or self._megabytes  # 0 once it is dead
        return found

    def end(self) -> None:
        """Kill it, if it still lives, and release its pipes and files. What it started ends when its pipes close."""
        self.kill()
        self._process.wait()
        self._listener.join(timeout=10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._stderr.close()

    def last_words(self, limit: float | None = None) -> str:
        """How it ended, once it has: the reason in the first line, then its stderr since it got its task, where there is any.

        limit: megabytes that it might take, for the reason.
        """
        status = self._process.wait()
        if self._nonsense:
            return self._nonsense
        first = max(self._stderr_before, self._stderr_size() - MAX_STDERR)
        words = os.pread(self._stderr.fileno(), MAX_STDERR, first).decode(errors="replace").strip()
        if status >= 0:
            reason = words.splitlines()[-1] if words else f"exit status {status}"
        else:
            name = signal.Signals(-status).name
            known = f": {describe_kill(self._megabytes, limit, self._oom_before)}" if name == "SIGKILL" else ""
            reason = f"killed by {name}{known}"
        return f"{reason}\n\n{words}" if words and words != reason else reason


def environment_of(threads: int | None) -> dict[str, str]:
    """This process's environment with its module path; libraries that count threads get `threads`, unless that is None."""
    counted = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **counted}
