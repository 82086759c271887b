"""Progress of all tasks of a replay together."""

from collections.abc import Callable, Sequence

from attacker.attacks import Progress
from attacker.replay.tasks import Task

Watch = Callable[[float, int, str], None]
"""Callback with (number of cases done, fractional for cases under way; number of all cases; a few words)."""


class Meter:
    """The progress of several tasks: the number of cases done, with fractions for tasks under way, is reported to `watch`.

    The share of a task never falls: an attack of several stages, such as closed forms and then a search, counts each from 0.
    """

    def __init__(self, tasks: Sequence[Task], watch: Watch | None) -> None:
        self._cases = [len(task.members) for task in tasks]
        self._shares = [0.0] * len(tasks)
        self._watch = watch

    def record_progress(self, number: int, share: float, message: str) -> None:
        """Record that the share `share`, in [0, 1], of the task with index `number` is done, and report the total to `watch`.

        message: a few words on the progress, reported as well.
        """
        self._shares[number] = max(self._shares[number], share)
        if self._watch is not None:
            done = sum(cases * share for cases, share in zip(self._cases, self._shares, strict=True))
            self._watch(done, sum(self._cases), message)

    def of_attack(self, number: int) -> Progress:
        """Return the progress callback of the task with index `number`, to be passed to the attack that works on this task."""
        return lambda done, total, message: self.record_progress(
            number, compute_share(done, total), format_progress(done, total, message)
        )


def compute_share(done: int, total: int) -> float:
    """Return the finished share of a task, done / total, in [0, 0.99]: a task is complete only once its files are written.

    done, total: number of iterations done, and the largest number that the attack may take.
    """
    return min(0.99, done / max(1, total))


def format_progress(done: int, total: int, message: str) -> str:
    """Return the progress of an attack as one line, such as "40 of 100, loss 0.1". done, total: as in `compute_share`."""
    return f"{done} of {total}, {message}"
