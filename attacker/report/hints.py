"""Hints on what is missing in a run, with the command that creates it if there is one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import Any

from attacker.attacks.registry import parse_arguments
from attacker.scoring.states import FINISHED_STATES, CaseState

Record = dict[str, Any]


@dataclass(frozen=True)
class Hint:
    """A hint on what is missing or damaged in a run.

    what: the hint as text. command: the command that creates what is missing; "" if there is none.
    """

    what: str
    command: str = ""


def list_unfinished(
    metadata: Record, states: Mapping[str, CaseState], scored: Mapping[str, CaseState], *, replay: str, score: str
) -> list[Hint]:
    """Return the hints on one attack: how many cases are not attacked yet, interrupted, and not scored yet.

    A case counts as not scored if it is finished now (done or failed), and was not finished at the last scoring or never scored.

    metadata: content of its attack.json. states: dict from the key of each of its cases to the case's state now. scored: dict
    from the key of each case with score rows to the case's state at the last scoring. replay, score: the commands to name in the
    hints; if `score` is "", the hint on scoring is left out.
    """
    spec, count = metadata["spec"], len(states)
    waiting, interrupted = (sum(state == wanted for state in states.values()) for wanted in ("waiting", "interrupted"))
    unscored = sum(state in FINISHED_STATES and scored.get(key) not in FINISHED_STATES for key, state in states.items())
    hints = []
    if waiting:
        hints.append(Hint(f"{spec}: {waiting} of {_format_cases(count)} not attacked yet.", replay))
    if interrupted:
        hints.append(Hint(f"{spec}: {interrupted} of {_format_cases(count)} interrupted: the best so far is shown.", replay))
    if unscored and score:
        hints.append(Hint(f"{spec}: {unscored} of {_format_cases(count)} not scored yet.", score))
    return hints


def _format_cases(count: int) -> str:
    """Return a number of cases and the verb "is" or "are", such as "1 case is" or "4 cases are"."""
    return f"{count} case is" if count == 1 else f"{count} cases are"


def make_replay_command(folder: Path, metadata: Mapping[str, Any] | None = None, *, model: str = "") -> str:
    """Return the command that replays an attack and its null, skipping cases that have a complete reconstruction.

    It repeats the attack's arguments, its seed, the oracles of labels and logits, and a model from outside this project, but no
    other options.

    folder: folder of the recording. metadata: content of the attack's attack.json; None for the attack named `cpl` with its
    defaults, and then `model` is the recording's network.
    """
    words = ["attacker", "replay", str(folder), "--attack"]
    if metadata is None:
        words.append("cpl")
    else:
        words.append(str(metadata["attack"]))
        for key, value in parse_arguments(str(metadata["spec"])).items():
            words += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
        if metadata["seed"]:
            words += ["--seed", str(metadata["seed"])]
        # a null gets no oracles, but its folder is that of a replay with oracles
        oracles = metadata.get("asked_oracles", metadata["oracles"])
        words += [word for oracle in ("labels", "logits") if oracle in oracles for word in ("--oracle", oracle)]  # not its own
        model = str(metadata.get("run", {}).get("model", ""))
    if ":" in model:  # code outside this project is imported only if the command names it
        words += ["--model", model]
    return join(words)
