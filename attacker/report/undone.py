"""Missing parts of a run, each with the command that creates it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacker.report.commands import replay_command, score_command
from attacker.scoring.states import FINISHED, State

Record = dict[str, Any]


@dataclass(frozen=True)
class Missing:
    """A part that is missing in a run. command: the command that creates it, if there is one."""

    what: str
    command: str = ""


def not_replayed(recording: Path) -> Missing:
    """Nothing at all was attacked."""
    return Missing("No attack was replayed on this recording yet.", replay_command(recording))


def unfinished(
    told: Record, states: Mapping[str, State], scored: Mapping[str, State], *, replay: str, score: str
) -> list[Missing]:
    """What is left to replay and to score of one attack.

    told: its attack.json. states: of its cases, as they are now. scored: as they were when they were scored, of those that were.
    replay, score: the commands; score is "" where there is no truth.
    """
    spec, count = told["spec"], len(states)
    waiting, interrupted = (sum(state == wanted for state in states.values()) for wanted in ("waiting", "interrupted"))
    unscored = sum(state in FINISHED and scored.get(key) not in FINISHED for key, state in states.items())
    missing = []
    if waiting:
        missing.append(Missing(f"{spec}: {waiting} of {counted(count)} not attacked yet.", replay))
    if interrupted:
        missing.append(Missing(f"{spec}: {interrupted} of {counted(count)} interrupted: the best so far is shown.", replay))
    if unscored and score:
        missing.append(Missing(f"{spec}: {unscored} of {counted(count)} not scored yet.", score))
    return missing


def counted(count: int) -> str:
    """ "1 case is", "4 cases are"."""
    return f"{count} case is" if count == 1 else f"{count} cases are"


def no_truth(run: Path) -> Missing:
    """Nothing can be scored here."""
    return Missing(
        "No truth was given, so that nothing could be scored; with the folder that the clients wrote it can be:",
        f"{score_command(run)} --truth FOLDER",
    )


def no_null(recording: Path, told: Mapping[str, Any]) -> Missing:
    """There is nothing to compare an attack's scores with."""
    return Missing(f"{told['spec']} has no scored null.", replay_command(recording, told))
