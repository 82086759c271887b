"""Which cases of several rounds count: an example of a client is scored once, though two replays attacked its round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from attacker.reconstruction import Reconstruction

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Superseded:
    """A case some of whose rounds are in cases that count before it.

    by:   keys of these cases. rounds: those of its own that they hold. rest: those that they do not hold.
    """

    by: tuple[str, ...]
    rounds: frozenset[int]
    rest: frozenset[int]

    @property
    def words(self) -> str:
        """What becomes of its scores."""
        by = f"case{'s' * (len(self.by) > 1)} {', '.join(self.by)}"
        if not self.rest:
            return f"not scored: its rounds are counted in {by}"
        rest = ", ".join(map(str, sorted(self.rest)))
        return f"scored by examples of round {rest} alone: its other rounds are counted in {by}"


def superseded(folder: Path, cases: Sequence[Record]) -> dict[str, Superseded]:
    """Cases, by key, of those of whole clients whose rounds are in others of the same client. folder: of the reconstructions.

    A case that is done counts before one that was cut off, that before one without an answer, and of two of the same kind the
    one of more rounds. A later one counts for examples of none of those rounds: what was used in both is scored once.
    """
    found: dict[str, Superseded] = {}
    whole = sorted((case for case in cases if "rounds" in case), key=lambda case: str(case["client"]))
    for _, group in groupby(whole, key=lambda case: str(case["client"])):
        own = list(group)
        if len(own) == 1:
            continue
        counted: list[tuple[str, frozenset[int]]] = []
        for case in sorted(own, key=lambda case: (_standing(folder, str(case["key"])), -len(case["rounds"]), str(case["key"]))):
            mine = frozenset(int(round) for round, _ in case["rounds"])
            if by := [(key, mine & theirs) for key, theirs in counted if mine & theirs]:
                held = frozenset[int]().union(*(rounds for _, rounds in by))
                found[str(case["key"])] = Superseded(tuple(key for key, _ in by), held, mine - held)
            if not by or mine - held:
                counted.append((str(case["key"]), mine))
    return found


def _standing(folder: Path, key: str) -> int:
    """0 of a case that is done, 1 of one that was cut off, 2 of one without an answer."""
    try:
        return int(Reconstruction.read(folder / f"{key}.safetensors").interrupted)
    except ValueError:
        return 2
