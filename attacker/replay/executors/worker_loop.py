"""A worker process as it runs: tasks come on stdin, messages go to stdout, one JSON document a line.

The end of stdin is the end of the process, at any time: nobody is left who could hear of it. SIGINT ends the task under way with
the best so far. This module imports nothing slow: stdout is taken over before anything else is imported that may print.
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
"""From the line of a task, the message that says how it ended."""


class Interrupt:
    """Lets one SIGINT through to the task under way, or else to the next one: what is kept of it is not cut off, too."""

    def __init__(self) -> None:
        self._came = self._listening = False

    def __call__(self, *_: Any) -> None:
        self._came = True
        self._raise()

    def __enter__(self) -> None:
        self._listening = True
        if self._came:
            self._raise()

    def __exit__(self, *_: Any) -> None:
        self._listening = False

    def _raise(self) -> None:
        if self._listening:
            self._listening = False
            raise KeyboardInterrupt


class WorkerChannel:
    """The worker's end of the conversation with its parent. interrupt: to be entered while a task is under way."""

    def __init__(self, tasks: TextIO, messages: TextIO, interrupt: Interrupt) -> None:
        self.interrupt = interrupt
        self._messages = messages
        self._lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._listen, args=(tasks,), daemon=True).start()

    def _listen(self, tasks: TextIO) -> None:
        for line in tasks:
            self._lines.put(line)
        os._exit(1)  # who gave the task may have been killed in the middle of it

    @property
    def is_idle(self) -> bool:
        """Whether no task waits yet."""
        return self._lines.empty()

    def read(self) -> str:
        """The next line; waits for it."""
        return self._lines.get()

    def say(self, **message: Any) -> None:
        """Send one message."""
        self._messages.write(json.dumps(message) + "\n")
        self._messages.flush()


class Throttle:
    """True when called at least `seconds` after the call that was last True; True at first."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last = seconds, float("-inf")

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


def serve(prepare: Callable[[WorkerChannel], Work]) -> NoReturn:
    """Do tasks until stdin ends. prepare: is called once, before the worker says that it is ready, and may read lines itself."""
    interrupt = Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    channel = WorkerChannel(sys.stdin, private_stdout(), interrupt)
    work = prepare(channel)
    channel.say(ready=True)
    while True:
        channel.say(**work(channel.read()))


def private_stdout() -> TextIO:
    """The stdout that only messages go to; what anything else prints goes to stderr."""
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return messages
