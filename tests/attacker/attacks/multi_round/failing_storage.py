"""A checkpoint storage for tests of attacks that are killed."""

from collections.abc import Mapping

from torch import Tensor


class FailingStorage:
    """A checkpoint storage that is due at every call, and raises an error after a number of calls."""

    every, look = 0.0, None

    def __init__(self, calls: int) -> None:
        self.calls, self.kept = calls, dict[str, dict[str, Tensor]]()

    def recall(self, key: str) -> dict[str, Tensor] | None:
        return self.kept.get(key)

    def keep(self, key: str, state: Mapping[str, Tensor], *, drop: str = "") -> None:
        if not self.calls:
            raise RuntimeError("killed")
        self.calls -= 1
        self.kept.pop(drop, None)
        self.kept[key] = {name: t.clone() for name, t in state.items()}
