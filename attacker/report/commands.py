"""Commands that complete a report, for the user to copy and paste."""

import ast
from collections.abc import Mapping
from pathlib import Path
from shlex import join
from typing import Any


def score_command(folder: Path) -> str:
    """Return the command that scores all reconstructions of a run."""
    return join(["attacker", "score", str(folder)])


def replay_command(folder: Path, told: Mapping[str, Any] | None = None) -> str:
    """Return the command that replays an attack and its null, skipping finished cases.

    told: content of the attack's attack.json; None for a command without an attack's arguments.
    """
    words = ["attacker", "replay", str(folder), "--attack"]
    if told is None:
        return join(words) + " cpl"
    words.append(str(told["attack"]))
    for key, value in _arguments(str(told["spec"])).items():
        words += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    if told["seed"]:
        words += ["--seed", str(told["seed"])]
    if "labels" in told["oracles"]:
        words += ["--oracle", "labels"]
    if ":" in (model := str(told.get("run", {}).get("model", ""))):  # code of others is imported only where it is named
        words += ["--model", model]
    return join(words)


def _arguments(spec: str) -> dict[str, Any]:
    """Return the keyword arguments in the text of an attack's specification; none if it cannot be parsed."""
    try:
        call = ast.parse(spec.removesuffix(" without gradient"), mode="eval").body
        return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords} if isinstance(call, ast.Call) else {}
    except (SyntaxError, ValueError):
        return {}
