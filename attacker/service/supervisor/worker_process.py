"""A worker process as the service sees it: given errands, listened to, measured, and ended."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from queue import SimpleQueue

from pydantic import ValidationError

from attacker.replay.executors.process_pool import environment
from attacker.service.supervisor.resources import Usage, usage
from attacker.service.worker.messages import MAX_LINE, JobTask, WorkerMessage

PROGRAM = "from attacker.service.worker.main import main; main()"
LAST_WORDS = 4000
"""Bytes of what a worker complained about that are kept."""


class WorkerProcess:
    """A process that does errands, one at a time.

    said: gets (this hand, what it said), and (this hand, None) when it has died, or said what nobody understands.
    recording: whose errands it does, once it has had one: a recording may come from anywhere, and what reading one did to a
    process, if anything, must not touch another one. gpu: the only one it sees. scores: whether it will have truth.
    """

    def __init__(
        self,
        said: "SimpleQueue[tuple[WorkerProcess | None, WorkerMessage | None]]",
        *,
        threads: int,
        gpu: str | None = None,
        scores: bool = True,
    ) -> None:
        self.recording: str | None = None
        self.gpu, self.ready, self.errands = gpu, False, 0
        self.idle_since = time.monotonic()
        self._babble, self._before = "", 0
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 closed with the hand
        seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *(["scores"] if scores else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env={**environment(threads), **seen},
            start_new_session=True,  # Ctrl-C reaches the service, which ends it
        )
        self._listener = threading.Thread(target=self._listen, args=(said,), daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _listen(self, said: "SimpleQueue[tuple[WorkerProcess | None, WorkerMessage | None]]") -> None:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline(MAX_LINE)).endswith(b"\n"):
            try:
                said.put((self, WorkerMessage.model_validate_json(line)))
            except ValidationError:
                break
        if len(line) == MAX_LINE or line.endswith(b"\n"):
            self._babble = f"it said what nobody understands: {line[:200]!r}"
        self.kill()
        said.put((self, None))

    def give(self, errand: JobTask) -> None:
        self.errands, self._before = self.errands + 1, self._complained()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its end is told by the thread that listens
            self._process.stdin.write(errand.as_json().encode() + b"\n")
            self._process.stdin.flush()

    def _complained(self) -> int:
        return os.fstat(self._complaints.fileno()).st_size

    def interrupt(self) -> None:
        """Have it end its errand with the best so far."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """At once, with what it started in its group; its death is told as any other."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def usage(self) -> Usage:
        """Of the process and all that it started."""
        return usage(self.pid)

    def end(self) -> None:
        """Kill it, if it still lives, and let go of all that belongs to it. What it started ends when its pipes close."""
        self.kill()
        self._process.wait()
        self._listener.join(timeout=10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._complaints.close()

    def last_words(self) -> str:
        """How it ended, once it has: the reason in a line, then what it complained about, where it did."""
        status = self._process.wait()
        if self._babble:
            return self._babble
        first = max(self._before, self._complained() - LAST_WORDS)
        words = os.pread(self._complaints.fileno(), LAST_WORDS, first).decode(errors="replace").strip()
        if status >= 0:
            reason = words.splitlines()[-1] if words else f"exit status {status}"
        else:
            name = signal.Signals(-status).name
            reason = f"killed by {name}" + (", as a system does that runs out of memory" if name == "SIGKILL" else "")
        return f"{reason}\n\n{words}" if words and words != reason else reason
