"""States of cases: done or failed, which are finished, and interrupted or waiting, which are not.

A case is the observations that are attacked together: one round of a client, or several.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from attacker.reconstruction import Reconstruction
from attacker.replay.results import make_failure_path, make_reconstruction_path
from fedsim.recording.safe_files import DamagedFile, read_json, to_printable

CaseState = Literal["done", "failed", "interrupted", "waiting"]
"""State of a case.

done: the attack finished and returned a reconstruction. failed: it stopped with a reason, or its file cannot be read.
interrupted: the search was stopped, and its best result so far is kept. waiting: not attacked yet, or stopped without any result.
"""
STATES: tuple[CaseState, ...] = get_args(CaseState)
FINISHED_STATES: frozenset[CaseState] = frozenset({"done", "failed"})
UNFINISHED_STATES: tuple[CaseState, ...] = ("waiting", "interrupted")
REASON_WAITING = "not attacked yet"
REASON_UNMATCHED = "fewer reconstructions than examples"
"""Reason of failure for an example of a finished case if the attack returned fewer examples than the case has."""
MAX_REASON_LENGTH = 2000
"""Largest number of characters of a reason that are kept."""


def read_case(folder: Path, key: str) -> tuple[Reconstruction | None, CaseState, str]:
    """Read the result of a case from the folder of its attack.

    Returns the reconstruction or None, the state, and why there is no reconstruction ("" if there is one). A case counts as
    failed in three situations: it has no reconstruction, but a recorded failure; its reconstruction cannot be read; or it was
    interrupted at first and failed when it was attacked again. key: key of the case.
    """
    path, failed = make_reconstruction_path(folder, key), make_failure_path(folder, key)
    if not os.path.lexists(path):
        return (None, "failed", read_reason(failed)) if os.path.lexists(failed) else (None, "waiting", REASON_WAITING)
    try:
        reconstruction = Reconstruction.read(path)
    except ValueError as error:
        return None, "failed", str(error)
    if reconstruction.interrupted and os.path.lexists(failed):
        return None, "failed", read_reason(failed)
    return reconstruction, "interrupted" if reconstruction.interrupted else "done", ""


def read_reason(failed: Path) -> str:
    """Return why a case failed, from the file `failed` that replay wrote.

    The reason is cut to `MAX_REASON_LENGTH` characters. If the file cannot be read, the text says so.
    """
    try:
        return to_printable(str(read_json(failed)["reason"])[:MAX_REASON_LENGTH])
    except DamagedFile as error:
        return str(error)
    except (KeyError, TypeError):
        return f"{failed}: holds no reason; replay the attack again"


def count_cases(states: Mapping[str, CaseState]) -> dict[str, int]:
    """Return the number of cases in each state that occurs, in the order of `STATES`. states: by key of the case."""
    counted = Counter(states.values())
    return {state: counted[state] for state in STATES if counted[state]}


def count_unfinished(cases: Mapping[str, int]) -> int:
    """Return the number of unfinished cases (waiting or interrupted), given the number of cases by state."""
    return sum(count for state, count in cases.items() if state not in FINISHED_STATES)


def format_counts(cases: Mapping[str, int], states: Sequence[CaseState] = STATES) -> str:
    """Return the numbers of cases in these states, as far as any has them, such as "2 done, 3 waiting"."""
    return ", ".join(f"{cases[state]:,} {state}" for state in states if cases.get(state))
