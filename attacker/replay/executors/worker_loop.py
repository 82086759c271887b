"""Main loop of a worker process, which reads tasks from stdin and writes messages to stdout, one JSON document per line.

The process exits at once when stdin is closed, since its parent is then gone. SIGINT stops the current task with its best result
so far. Nothing slow is imported here: stdout is redirected before other modules are imported that may print.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NoReturn, TextIO

Work = Callable[[str], dict[str, Any]]
"""Function that runs one task, given its line of JSON, and returns the message about its outcome."""


class Interrupt:
    """Handler of SIGINT that raises KeyboardInterrupt only inside a `with` block, which a worker puts around each task.

    After the first SIGINT, every later block raises KeyboardInterrupt as soon as it is entered. Each block raises it at most
    once, so that a second SIGINT cannot interrupt the writing of the best result; `raise_again` raises it once more.
    """

    def __init__(self) -> None:
        self._came = self._listening = self._repeated = False

    def __call__(self, *_: Any) -> None:
        self._came = True
        self._raise()

    def __enter__(self) -> None:
        self._listening = True
        if self._came:
            self._raise()

    def __exit__(self, *_: Any) -> None:
        self._listening = False

    def raise_again(self) -> None:
        """Raise KeyboardInterrupt, but only once, if SIGINT came earlier; a search calls this whenever it reports progress.

        A search that still goes on did not get the first exception: Python drops one that is raised inside a destructor.
        """
        if self._came and not self._repeated:
            self._repeated = True
            raise KeyboardInterrupt

    def _raise(self) -> None:
        if self._listening:
            self._listening = False
            raise KeyboardInterrupt


class WorkerChannel:
    """The worker's connection to its parent process. interrupt: context manager to enter while a task runs, see `Interrupt`."""

    def __init__(self, tasks: TextIO, messages: TextIO, interrupt: Interrupt) -> None:
        self.interrupt = interrupt
        self._messages = messages
        self._lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read_tasks, args=(tasks,), daemon=True).start()

    def _read_tasks(self, tasks: TextIO) -> None:
        for line in tasks:
            self._lines.put(line)
        os._exit(1)  # the parent process is gone

    @property
    def is_idle(self) -> bool:
        """Return whether all lines that have arrived were read."""
        return self._lines.empty()

    def read(self) -> str:
        """Return the next line; block until there is one."""
        return self._lines.get()

    def send_message(self, **message: Any) -> None:
        """Send the keyword arguments to the parent process, as one line of JSON."""
        self._messages.write(json.dumps(message) + "\n")
        self._messages.flush()


class Throttle:
    """A callable that returns True on the first call and when `seconds` have passed since it last returned True, else False."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last = seconds, float("-inf")

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


def serve(prepare: Callable[[WorkerChannel], Work]) -> NoReturn:
    """Run tasks until stdin is closed, which ends the process.

    prepare: called once with the channel, before the worker reports that it is ready; it may read lines. It returns the function
             that runs the task described by a line, and returns the message about its outcome as a dict.
    """
    interrupt = Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    channel = WorkerChannel(sys.stdin, _take_stdout(), interrupt)
    work = prepare(channel)
    channel.send_message(ready=True)
    while True:
        channel.send_message(**work(channel.read()))


def _take_stdout() -> TextIO:
    """Return the process's stdout for messages only, and redirect everything else that is printed to stderr."""
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return messages
