"""Choice of the case in which a round's examples are scored if several cases of one client's rounds contain this round.

A case is the observations that are attacked together: one round of a client, or several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from attacker.reconstruction import Reconstruction
from attacker.replay.results import make_reconstruction_path

CaseRecord = Mapping[str, Any]


@dataclass(frozen=True)
class SupersededCase:
    """The effect on the scores of a case that shares rounds with cases of higher priority, see `find_superseded`.

    by: keys of the cases of higher priority. rounds: the shared rounds; an example that was used in any of them is not scored in
    this case. rest: the case's other rounds; if there are none, no example is scored in it.
    """

    by: tuple[str, ...]
    rounds: frozenset[int]
    rest: frozenset[int]

    @property
    def words(self) -> str:
        """Return the effect as text, such as "not scored: the examples of its rounds are scored in case 7"."""
        by = f"case{'s' * (len(self.by) > 1)} {', '.join(self.by)}"
        if not self.rest:
            return f"not scored: the examples of its rounds are scored in {by}"
        rest = ", ".join(map(str, sorted(self.rest)))
        return f"scored only on examples of round {rest}: those of its other rounds are scored in {by}"


def find_superseded(folder: Path, cases: Sequence[CaseRecord]) -> dict[str, SupersededCase]:
    """Return a dict from the key of each case that shares rounds with cases of higher priority to the effect on its scores.

    Examples of shared rounds are scored only in the case of highest priority. Cases with a complete reconstruction come first,
    then interrupted ones, then those without a readable reconstruction; among equals the case with more rounds, then the one with
    the smaller key. Only cases of the same client are compared, and only those with the entry `rounds`, which attacks that use
    the rounds of a client together write, also for a case of one round.

    folder: folder of the reconstructions. cases: entries of `attack.json`.
    """
    superseded: dict[str, SupersededCase] = {}
    multi_round = sorted((case for case in cases if "rounds" in case), key=lambda case: str(case["client"]))
    for _, group in groupby(multi_round, key=lambda case: str(case["client"])):
        of_client = list(group)
        if len(of_client) == 1:
            continue
        scored: list[tuple[str, frozenset[int]]] = []
        for case in sorted(
            of_client, key=lambda case: (_rank_status(folder, str(case["key"])), -len(case["rounds"]), str(case["key"]))
        ):
            case_rounds = frozenset(int(round) for round, _ in case["rounds"])
            if by := [(key, case_rounds & scored_rounds) for key, scored_rounds in scored if case_rounds & scored_rounds]:
                shared = frozenset[int]().union(*(rounds for _, rounds in by))
                superseded[str(case["key"])] = SupersededCase(tuple(key for key, _ in by), shared, case_rounds - shared)
            if not by or case_rounds - shared:
                scored.append((str(case["key"]), case_rounds))
    return superseded


def _rank_status(folder: Path, key: str) -> int:
    """Return 0 for a case with a complete reconstruction, 1 with an interrupted one, 2 without a readable one."""
    try:
        return int(Reconstruction.read(make_reconstruction_path(folder, key)).interrupted)
    except ValueError:
        return 2
