"""What a run still lacks, each with the command that makes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacker.report.commands import replay_command, score_command
from attacker.scoring.counted import superseded

Record = dict[str, Any]


@dataclass(frozen=True)
class Missing:
    """Something that a whole run has and this one lacks. command: makes it, where one does."""

    what: str
    command: str = ""


def not_replayed(recording: Path) -> Missing:
    """Nothing at all was attacked."""
    return Missing("No attack was replayed on this recording yet.", replay_command(recording))


def waiting(run: Path, recording: Path, source: str, told: Record, scored: set[tuple[str, str]], *, truth: bool) -> list[Missing]:
    """What is left to replay and to score of one attack. truth: whether the run has any of its own."""
    folder = run / "reconstructions" / source
    others = superseded(folder, told["cases"])
    keys = [case["key"] for case in told["cases"] if case["status"] == "complete" and case["key"] not in others]
    files = {path.name for path in folder.iterdir()}
    left = sum(f"{key}.safetensors" not in files and f"{key}.failed.json" not in files for key in keys)
    unscored = sum((source, key) not in scored for key in keys)
    missing = []
    if left:
        missing.append(
            Missing(f"{told['spec']}: {left} of {len(keys)} cases are not attacked yet.", replay_command(recording, told))
        )
    if unscored and truth:
        missing.append(Missing(f"{told['spec']}: {unscored} of {len(keys)} cases are not scored yet.", score_command(run)))
    return missing


def no_truth(run: Path) -> Missing:
    """Nothing can be scored here."""
    return Missing(
        "No truth was given, so that nothing could be scored; with the folder that the clients wrote it can be:",
        f"{score_command(run)} --truth FOLDER",
    )


def unfinished(recording: Path, spec: str, told: Mapping[str, Any], *, interrupted: int, null: bool) -> list[Missing]:
    """What is left to do for one attack with scores. interrupted: cases; null: whether there is one beside it."""
    missing = []
    if interrupted:
        cases = "1 case was" if interrupted == 1 else f"{interrupted} cases were"
        missing.append(Missing(f"{spec}: {cases} interrupted: the best so far is shown.", replay_command(recording, told)))
    if not null:
        missing.append(Missing(f"{spec} has no scored null.", replay_command(recording, told)))
    return missing
