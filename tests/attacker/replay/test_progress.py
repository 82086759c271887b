"""Tests of the progress of a replay."""

from attacker.replay.tasks import Meter, Task, TaskCase


def make_task(cases: int) -> Task:
    return Task(members=tuple(TaskCase(key=str(i), rows=((1, str(i)),)) for i in range(cases)))


def test_progress_never_falls() -> None:
    """An attack of two stages, here closed forms and then a search, reports the second from its beginning."""
    told: list[float] = []
    meter = Meter([make_task(3), make_task(1)], lambda done, total, words: told.append(done / total))
    report = meter.of_attack(0)
    for done, most in ((1, 4), (3, 4), (1, 300), (270, 300)):
        report(done, most, "")
    assert told == sorted(told)
    assert told[-1] == 0.9 * 3 / 4
