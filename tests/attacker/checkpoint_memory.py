"""Checkpoint storages for tests of attacks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class DictMemory:
    """A checkpoint storage in memory that raises KeyboardInterrupt once a state is saved under a key that begins with `until`."""

    until: str
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    every: float = 0.0
    look: None = None

    def recall(self, key: str) -> dict[str, Tensor] | None:
        return self.states.get(key)

    def keep(self, key: str, state: Mapping[str, Tensor], *, drop: str = "") -> None:
        self.states[key] = {name: t.clone() for name, t in state.items()}
        self.states.pop(drop, None)
        if self.until and key.startswith(self.until) and len(state["active.history"]) == 2:
            raise SystemExit
