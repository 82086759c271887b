"""States of cases. Shares and means are over finished cases only."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from attacker.reconstruction import Reconstruction
from fedsim.recording.safe_files import DamagedFile, read_json

State = Literal["done", "failed", "interrupted", "waiting"]
"""done: the attack came to its end and has a reconstruction. failed: it gave up with a reason, or its file cannot be read.

interrupted: the search was cut off, and there is the best so far. waiting: not attacked yet, or cut off before any answer.
"""
STATES: tuple[State, ...] = get_args(State)
FINISHED: frozenset[State] = frozenset({"done", "failed"})
UNFINISHED: tuple[State, ...] = ("waiting", "interrupted")
WAITS = "not attacked yet"
MATCHED_NO_MORE = "fewer reconstructions than examples"
"""The failure of an example of a case that is done: others of the case have a reconstruction."""


def state_of(row: Mapping[str, Any]) -> State:
    """Return the state of a row's case, from the row as JSON; of rows written before they had one, by their failure."""
    if (said := row.get("state")) in STATES:
        state: State = said
        return state
    if row.get("interrupted"):
        return "interrupted"
    failure = row.get("failure")
    if failure == WAITS:
        return "waiting"
    return "done" if failure is None or failure == MATCHED_NO_MORE else "failed"


def read_case(folder: Path, key: str) -> tuple[Reconstruction | None, State, str]:
    """Read what replay left of a case in its folder: the reconstruction, the state, and why there is no reconstruction.

    A case that was cut off, and failed when it was attacked again, has failed.
    """
    path, failed = folder / f"{key}.safetensors", folder / f"{key}.failed.json"
    if not os.path.lexists(path):
        return (None, "failed", read_reason(failed)) if os.path.lexists(failed) else (None, "waiting", WAITS)
    try:
        found = Reconstruction.read(path)
    except ValueError as error:
        return None, "failed", str(error)
    if found.interrupted and os.path.lexists(failed):
        return None, "failed", read_reason(failed)
    return found, "interrupted" if found.interrupted else "done", ""


def read_reason(failed: Path) -> str:
    """Return why a case failed, as recorded by replay."""
    try:
        return str(read_json(failed)["reason"])
    except DamagedFile as error:
        return str(error)
    except (KeyError, TypeError):
        return f"{failed}: says no reason; replay the attack again"


class CaseState(Protocol):
    """Anything that names a case and its state, such as a score row."""

    @property
    def case(self) -> str: ...

    @property
    def state(self) -> State: ...


def count_cases(rows: Iterable[CaseState]) -> dict[str, int]:
    """The number of cases by state, each state that occurs, in the order of `STATES`."""
    counted = Counter({row.case: row.state for row in rows}.values())
    return {state: counted[state] for state in STATES if counted[state]}


def unfinished(cases: Mapping[str, int]) -> int:
    """Return the number of unfinished cases, given the number of cases by state."""
    return sum(count for state, count in cases.items() if state not in FINISHED)


def count_in_words(cases: Mapping[str, int], states: Sequence[State] = STATES) -> str:
    """ "2 done, 3 waiting"."""
    return ", ".join(f"{cases[state]:,} {state}" for state in states if cases.get(state))
