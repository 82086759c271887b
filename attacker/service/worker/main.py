"""A process that does jobs: errands on stdin, on stdout how they go, one JSON document a line.

The end of stdin is the end of this process, at any time: nobody is left who could hear of it. SIGINT ends the errand under way
with the best so far.
"""

import signal
import sys
import time
from typing import TextIO

from attacker.replay.executors.worker import Interrupt, lines_of, private_stdout, say
from attacker.service.jobs.job import JobProgress
from attacker.service.worker.messages import JobTask

EVERY = 0.5
"""Seconds between two words about one errand."""
LONGEST = 300
"""Characters of them."""


def main() -> None:
    interrupt = Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    answers = private_stdout()
    lines = lines_of(sys.stdin)
    from attacker.service.worker.execution import Watch, answered, warm  # after stdout is safe from what imports print

    def spoken() -> Watch:
        last = 0.0

        def watch(share: float, words: str) -> None:
            nonlocal last
            if (now := time.monotonic()) - last >= EVERY:
                last = now
                _tell(answers, share, words)

        return watch

    if lines.empty():  # nobody waits for it yet
        warm(scores="scores" in sys.argv[1:])
    say(answers, ready=True)
    while True:
        errand = JobTask.from_json(lines.get())
        answer = answered(errand, interrupt, spoken())
        say(answers, answer=answer.model_dump(mode="json"))


def _tell(answers: TextIO, share: float, words: str) -> None:
    told = JobProgress(share=min(1.0, max(0.0, share)), words=words[:LONGEST])
    say(answers, progress=told.model_dump())


if __name__ == "__main__":
    main()
