"""Candidates of several rounds that nothing linked: those that are the same example are merged.

A search that links nothing answers with an example for each place of each round, and so with the same example once for each
round that it was used in. Which candidates are the same is told from the candidates themselves: from their labels, from the
rounds that they fill, and from how near they are to each other, measured in what a pair of surely different ones costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

from torch import Tensor

from attacker.attacks.linking.matching import NEVER, pooled, squared_distances
from attacker.reconstruction import Reconstruction

SAME = 0.1
"""Distance of two candidates up to which they are the same example, relative to the median distance of different ones.

Chosen on twelve sets of 24 candidates for 8 CIFAR-10 images of the tuning part (`tuned.json`, "same candidates"): none of 45
groups was wrong up to 0.15, and 5 of 50 at 0.2. On three sets of the validation part none of 12 is wrong at 0.1."""
MOST = 600
"""Candidates up to which all pairs are compared."""


def merged(found: Reconstruction, missed: Mapping[int, float], *, same: float = SAME) -> Reconstruction:
    """Return the answer with one example for all candidates that are the same, in the order in which they first appear.

    missed: by round, the share of the observed gradient that the candidates in its places leave unexplained. Of a group, the
    candidate with the highest confidence is kept, of equal ones the one that leaves the least unexplained in its best round; it
    fills the places of all. An earlier example is the better guess where confidence is equal: a client passes over all of its
    examples before one comes again. same: see `SAME`.
    """
    rounds = _rounds(found)
    if not 1 < len(found.x) <= MOST or len(set().union(*rounds)) < 2:
        return found
    left = [min((missed[number] for number in own), default=1.0) for own in rounds]
    trust = list(zip((-found.confidence.nan_to_num(nan=-1.0)).tolist(), left, range(len(left)), strict=True))
    groups = sorted(groups_of(found.x, found.y, rounds, same=same), key=min)
    fewer = len(found.x) - len(groups)
    if not fewer:
        return found
    place = {i: number for number, group in enumerate(groups) for i in group}
    return replace(
        found,
        **_rows(found, [min(group, key=trust.__getitem__) for group in groups]),
        slots=tuple(replace(slot, example=place[slot.example]) for slot in found.slots),
        notes=(*found.notes, f"{fewer} of {len(found.x)} candidates were merged with others of other rounds, by their images"),
    )


def _rows(found: Reconstruction, kept: Sequence[int]) -> dict[str, Any]:
    """All that is said of each example, of those that are kept."""
    said: dict[str, Any] = {}
    for name in (field.name for field in fields(found) if field.name != "loss"):
        value = getattr(found, name)
        if isinstance(value, Tensor):
            said[name] = value[list(kept)]
        elif isinstance(value, Mapping):
            said[name] = {key: tuple(each[i] for i in kept) for key, each in value.items()}
    return said


def _rounds(found: Reconstruction) -> list[set[int]]:
    """The rounds whose places each candidate fills."""
    rounds: list[set[int]] = [set() for _ in range(len(found.x))]
    for slot in found.slots:
        rounds[slot.example].add(slot.round)
    return rounds


def groups_of(x: Tensor, y: Tensor, rounds: Sequence[set[int]], *, same: float) -> list[list[int]]:
    """Return groups of candidates (N, *shape) with labels (N,) that are the same example, each candidate in one group.

    The nearest two groups are joined, by the mean distance of their members, as long as that is below `same` times the median
    distance of candidates that cannot be the same: of one round, or of other labels. Groups of one round are never joined. Where
    no two candidates are surely different, nothing tells what is near, and each is a group of its own.
    """
    cost = squared_distances(*(pooled(x.clamp(0, 1).nan_to_num()),) * 2)
    apart = y[:, None] != y[None]
    for i, j in combinations(range(len(x)), 2):
        apart[i, j] = apart[j, i] = bool(apart[i, j]) or bool(rounds[i] & rounds[j])
    groups = [[i] for i in range(len(x))]
    if not bool(apart.any()):
        return groups
    limit = same * float(cost[apart].median())
    mean = cost.masked_fill(apart, NEVER).fill_diagonal_(NEVER)
    while len(groups) > 1 and float(mean.min()) < limit:
        a, b = sorted(divmod(int(mean.argmin()), len(groups)))
        sizes = len(groups[a]), len(groups[b])
        joined = (sizes[0] * mean[a] + sizes[1] * mean[b]) / sum(sizes)  # NEVER stays: a pair that cannot be the same
        mean[a], mean[:, a] = joined, joined
        mean[a, a] = NEVER
        kept = [i for i in range(len(groups)) if i != b]
        groups[a] += groups[b]
        groups, mean = [groups[i] for i in kept], mean[kept][:, kept]
    return groups
