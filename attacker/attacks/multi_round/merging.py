"""Merging of candidates from several rounds that were not linked but are the same example.

A search without links returns one candidate for each slot (position in a batch) of each round, so that an example that was used
in several rounds occurs several times. Candidates count as the same example if they have the same label, come from different
rounds, and are much nearer to each other than candidates that are certainly different.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from attacker.attacks.linking.matching import pool, squared_distances
from attacker.reconstruction import Reconstruction

MAX_SAME_DISTANCE = 0.1
"""Squared distance below which two candidates count as the same example, relative to the median squared distance of candidates
that are certainly different. Groups of candidates are compared by their mean squared distance, see `group_candidates`.

Chosen on twelve sets of 24 candidates for 8 CIFAR-10 images of the tuning split (`tuned.json`, "same candidates"): none of 45
groups was wrong up to 0.15, and 5 of 50 at 0.2. On three sets of the validation split none of 12 groups is wrong at 0.1."""
MAX_CANDIDATES = 600
"""Largest number of candidates for which all pairs are compared; more are not merged."""


def merge(answer: Reconstruction, missed: Mapping[int, float], *, different: int = 0) -> Reconstruction:
    """Return the reconstruction with one example for each group of equal candidates, in the order of their first occurrence.

    The reconstruction is returned unchanged if all candidates are of one round, or if there are more than MAX_CANDIDATES.
    The candidate with the highest confidence of a group is kept, and takes the batch positions (slots) of all candidates of the
    group. An undecided confidence is the lowest. Of candidates with equal confidence, the one with the smallest `missed` among
    its rounds is kept, then the earlier one.
    missed: dict from round to the distance between the gradient of the round's candidates and the observed one, relative to the
            norm of the observed one.
    different: number of first candidates that are known to be different examples, and are not merged with each other.
    """
    rounds = answer.list_rounds()
    if not 1 < len(answer.x) <= MAX_CANDIDATES or len(set().union(*rounds)) < 2:
        return answer
    left = [min((missed[number] for number in numbers), default=1.0) for numbers in rounds]
    trust = list(zip((-answer.confidence.nan_to_num(nan=-1.0)).tolist(), left, range(len(left)), strict=True))
    apart = [numbers | {0} if i < different else numbers for i, numbers in enumerate(rounds)]  # rounds are numbered from 1
    groups = sorted(group_candidates(answer.x, answer.y, apart, same=MAX_SAME_DISTANCE), key=min)
    fewer = len(answer.x) - len(groups)
    if not fewer:
        return answer
    place = {i: number for number, group in enumerate(groups) for i in group}
    return replace(
        answer.select([min(group, key=trust.__getitem__) for group in groups]),
        slots=tuple(replace(slot, example=place[slot.example]) for slot in answer.slots),
        notes=(*answer.notes, f"{fewer} of {len(answer.x)} candidates were merged with others of other rounds, by their images"),
    )


def group_candidates(x: Tensor, y: Tensor, rounds: Sequence[set[int]], *, same: float) -> list[list[int]]:
    """Divide candidates x (N, *shape) with labels y (N,) into groups of the same example; return lists of their indices.

    This is agglomerative clustering with average linkage of squared distances, between images averaged over squares of 2 pixels.
    The two nearest groups are joined as long as the mean squared distance of their members is at most `same` times the median
    squared distance of candidates that cannot be the same, because they are of the same round or have different labels.
    Candidates that cannot be the same are never joined. If there are none, or their median distance is 0, there is no scale to
    compare with, and no candidates are joined.
    rounds: for each candidate, the rounds in which it is assigned to a slot (a position in a batch).
    """
    cost = squared_distances(*(pool(x.clamp(0, 1).nan_to_num()),) * 2)
    apart = y[:, None] != y[None]
    for i, j in combinations(range(len(x)), 2):
        apart[i, j] = apart[j, i] = bool(apart[i, j]) or bool(rounds[i] & rounds[j])
    limit = same * float(cost[apart].median()) if bool(apart.any()) else 0.0
    if limit == 0:
        return [[i] for i in range(len(x))]
    never = 2 * limit * len(x) ** 2  # so large that a mean over pairs of which one has this cost is above the limit
    steps = linkage(squareform(cost.masked_fill(apart, never).fill_diagonal_(0).numpy(), checks=False), "average")
    groups: dict[int, list[int]] = {}
    for i, group in enumerate(fcluster(steps, limit, "distance").tolist()):
        groups.setdefault(group, []).append(i)
    return list(groups.values())
