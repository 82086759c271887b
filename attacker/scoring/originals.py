"""Originals behind the rounds of a case, and correctness of the rounds that an attack claims for each."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from attacker.reconstruction import Reconstruction
from fedsim.truth import Used

MeasuredRow = dict[str, Any]


@dataclass(frozen=True)
class Original:
    """A distinct example. rounds: rounds that used it, ascending. batch, position: of its first use. index: in the data set."""

    rounds: tuple[int, ...]
    batch: int
    position: int
    index: int


class Use(NamedTuple):
    """One observation of a case. clients: owners of the examples behind it; several for a sum."""

    round: int
    attempt: int
    clients: tuple[str, ...]


def uses(case: Mapping[str, Any]) -> list[Use]:
    """Return the observations of a case in the order of rounds, from the files of replay."""
    rounds = case.get("rounds") or [[case["round"], case["attempt"]]]
    cohorts = case.get("cohorts") or [case.get("cohort") or []] * len(rounds)
    return [
        Use(int(round), int(attempt), tuple(cohort) or (case["client"],))
        for (round, attempt), cohort in zip(rounds, cohorts, strict=True)
    ]


def originals(used: Iterable[tuple[int, Used]]) -> list[Original]:
    """Return the distinct examples of rounds in the order of their first use."""
    found: dict[int, Original] = {}
    for round, one in used:
        for batch, position, index in one.examples:
            known = found.setdefault(index, Original((round,), batch, position, index))
            if known.rounds[-1] != round:
                found[index] = replace(known, rounds=(*known.rounds, round))
    return list(found.values())


def count_places(used: Iterable[Used], epochs: int = 1) -> Counter[int]:
    """Of each example, how many candidates may be of it: as often as one pass of one round used it, in the round of most uses.

    used: of each round. epochs: passes of a round. That is 1, unless a round's steps ran over the end of the client's data, or
    several clients of a sum hold the same example: there an attack that returns as many examples as were reported returns
    some of them twice, and none too many.
    """
    places: Counter[int] = Counter()
    for one in used:
        places |= Counter({index: -(-uses // epochs) for index, uses in Counter(i for _, _, i in one.examples).items()})
    return places


def claimed(found: Reconstruction) -> list[tuple[int, ...]]:
    """Return, for each reconstructed example, the rounds that the attack claims for it, ascending."""
    rounds: list[set[int]] = [set() for _ in range(len(found.x))]
    for slot in found.slots:
        if 0 <= slot.example < len(rounds):
            rounds[slot.example].add(slot.round)
    return [tuple(sorted(one)) for one in rounds]


def link_fields(original: Original, rounds: Sequence[int] | None) -> MeasuredRow:
    """Return the fields of a row on links: the rounds claimed for its reconstruction, and whether all of them are right.

    rounds: None without a reconstruction. link_correct is None if at most one round is claimed.
    """
    linked = rounds is not None and len(rounds) > 1
    right = set(rounds or ()) <= set(original.rounds)
    return {"rounds_claimed": None if rounds is None else tuple(rounds), "link_correct": right if linked else None}
