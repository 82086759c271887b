"""A cut of the power: a call of a function that raises an error before it does anything."""

from typing import Any

import pytest


class PowerCut(Exception):
    pass


class CutBeforeCall:
    """The functions that `watch` names are counted, and the `at`-th call, from 1, of any of them raises `PowerCut`.

    done: number of calls so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.monkeypatch, self.at, self.done = monkeypatch, at, 0

    def watch(self, owner: Any, *names: str) -> None:
        for name in names:
            self.monkeypatch.setattr(owner, name, self._count(getattr(owner, name)))

    def _count(self, function: Any) -> Any:
        def counted(*args: Any, **keywords: Any) -> Any:
            self.done += 1
            if self.done == self.at:
                raise PowerCut
            return function(*args, **keywords)

        return counted
