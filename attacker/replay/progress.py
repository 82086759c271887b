"""How far all tasks of a replay are, together."""

from collections.abc import Callable, Sequence

from attacker.attacks import Progress
from attacker.replay.tasks import Task

Watch = Callable[[float, int, str], None]
"""Is called with (cases done, those under way by their share; cases in all; a few words)."""


class Meter:
    """Adds up the shares of the tasks that run, in cases."""

    def __init__(self, tasks: Sequence[Task], watch: Watch | None) -> None:
        self._cases = [len(task.members) for task in tasks]
        self._shares = [0.0] * len(tasks)
        self._watch = watch

    def told(self, number: int, share: float, words: str) -> None:
        """Task `number` is done by this share, in [0, 1]."""
        self._shares[number] = share
        if self._watch is not None:
            done = sum(cases * share for cases, share in zip(self._cases, self._shares, strict=True))
            self._watch(done, sum(self._cases), words)

    def of_attack(self, number: int) -> Progress:
        """The progress of an attack as that of its task."""
        return lambda done, most, words: self.told(number, share_of(done, most), words_of(done, most, words))


def share_of(done: int, most: int) -> float:
    """The share of an attack that is done: a task is done when its files are written."""
    return min(0.99, done / max(1, most))


def words_of(done: int, most: int, words: str) -> str:
    """What an attack says, for one line."""
    return f"{done} of {most}, {words}"
