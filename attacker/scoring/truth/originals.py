"""The true examples (originals) behind the observations of a case, and checks of the rounds that an attack claims for them.

A case is the observations that are attacked together: one round of a client, or several.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from attacker.scoring.measures import MeasuredRow
from fedsim.truth import RoundUsage


@dataclass(frozen=True)
class Original:
    """A distinct true example of a case: one that the observed clients used in training, at least once.

    rounds: rounds of the case that used it, in the order of the case. batch, position: its first use, as the number of the local
    step, from 1, and the position in the batch of this step, from 0; for a secure sum, the steps of its clients are numbered one
    client after the other. index: its index in the training set.
    """

    rounds: tuple[int, ...]
    batch: int
    position: int
    index: int


class CaseObservation(NamedTuple):
    """One observation of a case: its round, and the clients that it depends on (several for a secure sum).

    attempt: 1 plus the number of times that the run had been resumed when the round was recorded.
    """

    round: int
    attempt: int
    clients: tuple[str, ...]


def list_uses(case: Mapping[str, Any]) -> list[CaseObservation]:
    """Return the observations of a case in the order of its rounds in `attack.json`. case: the case's entry in this file."""
    rounds = case.get("rounds") or [[case["round"], case["attempt"]]]
    cohorts = case.get("cohorts") or [case.get("cohort") or []] * len(rounds)
    return [
        CaseObservation(int(round), int(attempt), tuple(cohort) or (case["client"],))
        for (round, attempt), cohort in zip(rounds, cohorts, strict=True)
    ]


def list_originals(used: Iterable[tuple[int, RoundUsage]]) -> list[Original]:
    """Return the distinct examples of several rounds in the order of their first use.

    used: pairs of a round and the examples used in it, in the order of the case's rounds.
    """
    originals: dict[int, Original] = {}
    for round, usage in used:
        for batch, position, index in usage.examples:
            known = originals.setdefault(index, Original((round,), batch, position, index))
            if known.rounds[-1] != round:
                originals[index] = replace(known, rounds=(*known.rounds, round))
    return list(originals.values())


def count_places(used: Iterable[RoundUsage], epochs: int = 1) -> Counter[int]:
    """Return a Counter from an example's index in the training set to how many reconstructions of a case may be assigned to it.

    The number is the example's uses in a round, divided by the number of epochs and rounded up; of several rounds, the largest
    number counts. It is 1 for most examples. It is larger if a client's last steps started again at the beginning of its data, or
    if several clients of a secure sum hold the same example: an attack that returns as many examples as were reported then has to
    return such examples more than once. used: the examples used in each round. epochs: epochs per round.
    """
    places: Counter[int] = Counter()
    for usage in used:
        places |= Counter({index: -(-uses // epochs) for index, uses in Counter(i for _, _, i in usage.examples).items()})
    return places


def make_link_fields(original: Original, rounds: Set[int] | None) -> MeasuredRow:
    """Return two fields of a score row on links between rounds: `rounds_claimed` and `link_correct`.

    original: the true example. rounds: the rounds that the attack claims for its reconstruction, returned as `rounds_claimed` in
    ascending order; None without a reconstruction. `link_correct` is whether all claimed rounds used the example, or None unless
    at least two rounds are claimed.
    """
    linked = rounds is not None and len(rounds) > 1
    right = (rounds or set()) <= set(original.rounds)
    return {"rounds_claimed": None if rounds is None else tuple(sorted(rounds)), "link_correct": right if linked else None}
