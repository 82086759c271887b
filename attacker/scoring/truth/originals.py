"""Originals behind the rounds of a case, and correctness of the rounds that an attack claims for each.

A case is the observations that are attacked together: one round of a client, or several.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from attacker.reconstruction import Reconstruction
from attacker.scoring.measures import MeasuredRow
from fedsim.truth import Used


@dataclass(frozen=True)
class Original:
    """A distinct example that a client trained on in the rounds of a case.

    rounds: rounds that used it, ascending. batch, position: those of its first use. index: its index in the data set.
    """

    rounds: tuple[int, ...]
    batch: int
    position: int
    index: int


class Use(NamedTuple):
    """One observation of a case: its round, and the clients that it depends on (several for a secure sum).

    attempt: number of the start of the run in which the round was recorded; above 1 only after a resume.
    """

    round: int
    attempt: int
    clients: tuple[str, ...]


def list_uses(case: Mapping[str, Any]) -> list[Use]:
    """Return the observations of a case in the order of rounds, given the case's entry in `attack.json`."""
    rounds = case.get("rounds") or [[case["round"], case["attempt"]]]
    cohorts = case.get("cohorts") or [case.get("cohort") or []] * len(rounds)
    return [
        Use(int(round), int(attempt), tuple(cohort) or (case["client"],))
        for (round, attempt), cohort in zip(rounds, cohorts, strict=True)
    ]


def list_originals(used: Iterable[tuple[int, Used]]) -> list[Original]:
    """Return the distinct examples of several rounds in the order of their first use, given pairs of round and its truth."""
    found: dict[int, Original] = {}
    for round, one in used:
        for batch, position, index in one.examples:
            known = found.setdefault(index, Original((round,), batch, position, index))
            if known.rounds[-1] != round:
                found[index] = replace(known, rounds=(*known.rounds, round))
    return list(found.values())


def count_places(used: Iterable[Used], epochs: int = 1) -> Counter[int]:
    """Return a dict from an example's index in the data set to how many reconstructions it may have.

    The number is the largest one over rounds of the example's uses in the round, divided by the number of epochs and rounded up.
    It is 1 for most examples. It is larger if a round's steps continued beyond the end of the client's data, or if several
    clients of a secure sum hold the same example: an attack that returns as many examples as were reported then has to return
    such examples more than once. used: truth of each round. epochs: epochs per round.
    """
    places: Counter[int] = Counter()
    for one in used:
        places |= Counter({index: -(-uses // epochs) for index, uses in Counter(i for _, _, i in one.examples).items()})
    return places


def list_claimed_rounds(found: Reconstruction) -> list[tuple[int, ...]]:
    """Return, for each reconstructed example, the rounds that the attack claims for it, ascending."""
    rounds: list[set[int]] = [set() for _ in range(len(found.x))]
    for slot in found.slots:
        if 0 <= slot.example < len(rounds):
            rounds[slot.example].add(slot.round)
    return [tuple(sorted(one)) for one in rounds]


def make_link_fields(original: Original, rounds: Sequence[int] | None) -> MeasuredRow:
    """Return the fields of a score row on links: the rounds that the attack claims for an example, and whether all are right.

    rounds: the claimed rounds; None without a reconstruction. `link_correct` is None if at most one round is claimed.
    """
    linked = rounds is not None and len(rounds) > 1
    right = set(rounds or ()) <= set(original.rounds)
    return {"rounds_claimed": None if rounds is None else tuple(rounds), "link_correct": right if linked else None}
