"""Replay: runs attacks on the observations of a recording. Names are imported lazily, so that worker processes start fast."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attacker.replay.attack_facts import read_facts
    from attacker.replay.replay import Replay, ReplayResult
    from attacker.replay.results import is_done, make_reconstruction_path

__all__ = ["Replay", "ReplayResult", "is_done", "make_reconstruction_path", "read_facts"]

_MODULES = {
    "Replay": "replay",
    "ReplayResult": "replay",
    "is_done": "results",
    "make_reconstruction_path": "results",
    "read_facts": "attack_facts",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
