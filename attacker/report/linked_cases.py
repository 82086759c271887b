"""Results of attacks on several rounds of a client at once: the rounds used and left out, and the attack's notes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacker.reconstruction import Reconstruction
from attacker.replay.results import make_reconstruction_path
from attacker.report.hints import Record
from attacker.scoring.superseded_cases import SupersededCase, find_superseded
from fedsim.recording.selection import Rounds


@dataclass(frozen=True, kw_only=True)
class LinkedCase:
    """One case of an attack that uses the rounds of a client together. The case may hold a single round.

    rounds:   rounds in which the attack places an example; without a readable reconstruction, all rounds of the case.
    left_out: the client's rounds that are not part of the case: pairs of round and reason.
    unscored: text on the rounds of this case that are scored as part of other cases instead; "" if there are none.
    notes:    the attack's notes on the result.
    examples: number of reconstructed examples; None if no reconstruction can be read. several: how many of them the attack
              assigns to several rounds.
    """

    case: str
    client: str
    rounds: tuple[int, ...]
    left_out: tuple[tuple[int, str], ...]
    unscored: str = ""
    notes: tuple[str, ...] = ()
    examples: int | None = None
    several: int = 0

    @property
    def rounds_text(self) -> str:
        """The field `rounds` as text, such as "1 to 3, 7"."""
        return str(Rounds.of(self.rounds)).replace("-", " to ").replace(",", ", ")


def read_linked_cases(folder: Path, metadata: Mapping[str, Any]) -> tuple[LinkedCase, ...]:
    """Return the cases of an attack that uses the rounds of a client together, in the order of its attack.json.

    The result is () for an attack on single rounds. folder: folder of its reconstructions. metadata: content of its attack.json.
    """
    others = find_superseded(folder, metadata["cases"])
    return tuple(_read_linked_case(folder, case, others.get(case["key"])) for case in metadata["cases"] if "rounds" in case)


def _read_linked_case(folder: Path, case: Record, other: SupersededCase | None) -> LinkedCase:
    facts: Record = {
        "case": str(case["key"]),
        "client": str(case["client"]),
        "rounds": tuple(int(round) for round, _ in case["rounds"]),
        "unscored": "" if other is None else other.words,
        "left_out": tuple((int(round), str(reason)) for round, reason in case.get("left_out", ())),
    }
    try:
        reconstruction = Reconstruction.read(make_reconstruction_path(folder, case["key"]))
    except ValueError:
        return LinkedCase(**facts)
    each = reconstruction.list_rounds()
    several, facts["rounds"] = sum(len(rounds) > 1 for rounds in each), tuple(sorted(set().union(*each)))
    return LinkedCase(**facts, notes=reconstruction.notes, examples=len(reconstruction.x), several=several)
