"""Detection of passes (epochs) over a client's examples: the rounds at which it starts again at its first examples."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attacker.attacks.linking.pair_costs import PairCosts

FALSE_MATCH_RATE = 0.05
"""Accepted rate of false matches: how often the nearest different example may count as the same."""
MIN_REPEATED_SHARE = 0.3
"""A pass of N examples is taken to end before an observation only if at least this share of the N examples that follow repeat
examples of the pass. Of the N examples, those that rather repeat one another are subtracted."""
MIN_REPEATED = 2
"""Smallest number of repeats, counted as for MIN_REPEATED_SHARE. Both conditions must hold."""
NEW_PENALTY = 0.1
"""Penalty for an example that the previous pass did not have, relative to the reward for an example that it had."""
NEAR_BEST_SHARE = 0.9
"""Ends of a pass whose score is above this share of the best score count as equally good, and an early end is chosen. If the best
score alone decided, two passes could be taken for one, since the next two passes repeat both."""
MATCH_SHARE = 0.5
"""Similarity is limited to this share of the median similarity of an example to its most similar earlier place. Without a limit,
the latest occurrence, whose weights are the nearest, would count most, and several passes would be taken for one."""
CLEAR_SHARE = 0.7
"""An end of a pass of N examples that comes before the end with the best score also counts as good if its score is at least this
share of N, so that most of the N examples that follow clearly repeat the pass."""


class Passes(NamedTuple):
    """The passes of a client over its examples.

    starts:   indices of the observations that begin a pass, ascending from 0.
    examples: number of examples in the longest pass whose end was found by comparison; None if no end was found by comparison, or
              if each round is a pass because training is prescribed in epochs.
    """

    starts: tuple[int, ...]
    examples: int | None


def find_passes(costs: PairCosts, ends: Sequence[bool]) -> Passes:
    """Estimate where passes begin: divide observations, sorted by round, into passes in which no example occurs twice.

    costs: costs between all places. ends: for each observation, whether its size shows that it ends a pass (a short last batch).

    A pass is taken to end where the following examples resemble those of the pass. The number of examples need not be constant,
    since rounds may be missing and batch sizes may change. The observations after the last end that was found are one pass,
    unless the two passes before that end have the same number N of examples. Then a further pass begins after every N of the
    remaining examples, until a pass would have to begin within an observation.
    """
    alike = _measure_similarity(costs)
    if len(clear := alike.amax(dim=1)[alike.any(dim=1)]):
        alike = (alike / (MATCH_SHARE * clear.median())).clamp(max=1)
    sizes = torch.bincount(costs.owner, minlength=len(ends))
    starts = [0]
    while (start := _find_next_pass(alike, costs.owner, sizes, starts[-1], ends)) is not None:
        starts.append(start)
    closed = [int(sizes[a:b].sum()) for a, b in pairwise(starts)]
    if len(closed) > 1 and closed[-1] == closed[-2]:
        starts += _cut_passes(sizes, starts[-1], closed[-1])
    return Passes(tuple(starts), max(closed, default=None))


def _measure_similarity(costs: PairCosts) -> Tensor:
    """Return how clearly the example at each of P places also occurs in each of R observations, (P, R).

    The entry is a threshold minus the cost of the most similar place in the observation. It is 0 if this difference is negative,
    and for observations that are not earlier than the observation of the place. Each place has its own threshold, chosen such
    that for an example that occurs in no earlier observation, the lowest cost to an earlier place is below the threshold with a
    probability of about FALSE_MATCH_RATE.
    """
    count = int(costs.owner[-1]) + 1 if len(costs.owner) else 0
    nearest = torch.full((len(costs.owner), count), float("inf"))
    nearest = nearest.scatter_reduce(1, costs.owner.expand(len(costs.owner), -1), costs.cost, "amin")
    earlier = torch.arange(count)[None] < costs.owner[:, None]
    nearest = nearest.where(earlier, float("inf"))
    candidates = (costs.cost.isfinite() & (costs.owner[None] < costs.owner[:, None])).sum(dim=1).clamp(min=1)
    if not len(costs.different):
        return torch.zeros_like(nearest)
    at = (FALSE_MATCH_RATE / candidates * len(costs.different)).long().clamp(max=len(costs.different) - 1)
    return (costs.different[at][:, None] - nearest).clamp(min=0)


def _find_next_pass(alike: Tensor, owner: Tensor, sizes: Tensor, start: int, ends: Sequence[bool]) -> int | None:
    """Return the index of the observation that begins the pass after the current one; None if there is no later pass.

    Every later observation i is a candidate: the N examples of the pass before i are compared with the N examples from i on. The
    score of i is high if the examples from i on resemble examples of the pass more than each other. Candidates for which too few
    examples do so are excluded (MIN_REPEATED_SHARE, MIN_REPEATED). Of the other candidates, two kinds are kept: those whose score
    is near the best score (NEAR_BEST_SHARE), and those that come before the candidate with the best score and have a score of at
    least CLEAR_SHARE per example. The first kept candidate that follows an observation marked in `ends` is returned. If no kept
    candidate does, the result is the one with the best score among the kept candidates that make the pass less than 1.5 times as
    long as the first kept candidate does. None if no candidate is kept.
    A place is the position of one example in an observation; there are P places in R observations.
    alike: (P, R) how clearly each place is repeated in each observation, from 0 to 1.
    owner: (P,) index of the observation of each place. sizes: (R,) number of places of each observation.
    start: index of the observation that begins the current pass.
    ends:  for each observation, whether its size shows that it ends a pass.
    """
    count = len(sizes)
    if start + 1 >= count:
        return None
    position = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    since = alike.flip(1).cummax(dim=1).values.flip(1)  # since[t, i]: largest similarity to observation i or a later one
    before = alike[:, start:].cummax(dim=1).values  # before[t, i]: largest similarity to observations start to start + i
    usual = alike[alike > 0].mean().nan_to_num() if bool((alike > 0).any()) else torch.zeros(())
    scores, holds, is_clear = torch.full((count,), -1.0), *torch.zeros(2, count, dtype=torch.bool)
    for i in range(start + 1, count):
        low = int(position[i])
        high = min(2 * low - int(position[start]), len(owner))
        old = before[low:high, i - 1 - start]
        candidates = since[low:high, i]
        scores[i] = (old - candidates).sum() - NEW_PENALTY * usual * (old <= candidates).sum()
        again = int((old > candidates).sum()) - int((candidates > old).sum())
        holds[i] = again >= MIN_REPEATED and again >= MIN_REPEATED_SHARE * (high - low)
        is_clear[i] = scores[i] >= CLEAR_SHARE * (high - low)
    scores = scores.where(holds, -1.0)
    is_clear[int(scores.argmax()) :] = False
    good = (((scores > NEAR_BEST_SHARE * scores.max()) | is_clear) & holds).nonzero().flatten().tolist()
    if at_ends := [i for i in good if ends[i - 1]]:
        return int(at_ends[0])
    before_double = [i for i in good if position[i] - position[start] < 1.5 * (position[good[0]] - position[start])]
    return max(before_double, key=lambda i: float(scores[i]), default=None)


def _cut_passes(sizes: Tensor, start: int, examples: int) -> list[int]:
    """Return the indices of the observations after `start` at which further passes begin, if each has `examples` examples.

    The first of these passes begins at the observation `start`. The list ends where a pass would end within an observation.
    """
    passes, filled = [], 0
    for i in range(start, len(sizes)):
        if filled == examples:
            passes.append(i)
            filled = 0
        filled += int(sizes[i])
        if filled > examples:
            break
    return passes
