"""A process that does tasks of a replay: tasks on stdin, on stdout what came of them, one JSON document a line."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any, TextIO

EVERY = 0.2
"""Seconds between two words about one task."""


def main() -> None:
    """The first line of stdin is the job, the others are its tasks; the end of stdin is the end of this process, at any time.

    SIGINT ends the task under way with the best so far.
    """
    interrupt = Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    answers = private_stdout()
    lines = lines_of(sys.stdin)
    from attacker.replay.tasks import Bench, ReplayJob, Task, TaskOutcome  # after stdout is safe from what imports print

    bench = Bench(ReplayJob.from_json(lines.get()))
    say(answers, ready=True)
    while True:
        task = Task.from_json(lines.get())
        try:
            with interrupt:
                outcome = bench.run(task, _progress(answers))
        except KeyboardInterrupt:  # before the attack began, or after it ended
            outcome = TaskOutcome(interrupted=True)
        say(answers, outcome=asdict(outcome))


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


def _progress(answers: TextIO) -> Callable[[int, int, str], None]:
    last = 0.0

    def progress(done: int, most: int, words: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= EVERY:
            last = now
            say(answers, progress=[done, most, words])

    return progress


def private_stdout() -> TextIO:
    """The stdout that only answers go to; what anything else prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def lines_of(source: TextIO) -> "SimpleQueue[str]":
    """Lines as they come. Who gave them may be killed in the middle of a task, and is then waited for by nobody."""
    queue: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in source:
            queue.put(line)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return queue


def say(answers: TextIO, **message: Any) -> None:
    """One message, in a line."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
