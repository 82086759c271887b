"""Detection of passes (epochs): the rounds at which a client begins its examples again."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attacker.attacks.linking.described import Likeness

FALSE = 0.05
"""Accepted rate of false matches: how often the nearest different example may count as the same."""
SHARE = 0.3
"""Smallest share of a pass's examples that must be known from the pass before."""
LEAST = 2
"""Smallest number of a pass's examples that must be known from the pass before."""
NEWS = 0.1
"""Penalty for an example that the previous pass did not have, relative to the reward for one that it had."""
NEAR_BEST = 0.9
"""Share of the best score from which an earlier end is preferred, since two passes repeat as one does."""


class Passes(NamedTuple):
    """Passes of a client. starts: observations that begin a pass, ascending from 0.

    examples: number of examples of the longest pass that is followed by another one; None if there is only one pass.
    """

    starts: tuple[int, ...]
    examples: int | None


def passes(seen: Likeness, ends: Sequence[bool]) -> Passes:
    """Divide observations, in the order of rounds, into passes in which no example occurs twice.

    ends: for each observation, whether its size shows that it ends a pass (its last batch is short).

    A pass ends where later examples resemble those of the pass. The number of examples is not assumed, so rounds may be missing
    and batch sizes may change. After two passes of N examples each, the last pass, in which few examples may repeat, is cut after
    N examples if that lies between two observations.
    """
    alike = _alike(seen)
    sizes = torch.bincount(seen.owner, minlength=len(ends))
    starts = [0]
    while (start := _next(alike, seen.owner, sizes, starts[-1], ends)) is not None:
        starts.append(start)
    closed = [int(sizes[a:b].sum()) for a, b in pairwise(starts)]
    if len(closed) > 1 and closed[-1] == closed[-2]:
        starts += _cut(sizes, starts[-1], closed[-1])
    return Passes(tuple(starts), max(closed, default=None))


def _alike(seen: Likeness) -> Tensor:
    """Return (P, R): how much nearer than by chance the nearest place of each earlier observation is; 0 if it is not."""
    count = int(seen.owner[-1]) + 1 if len(seen.owner) else 0
    nearest = torch.full((len(seen.owner), count), float("inf"))
    nearest = nearest.scatter_reduce(1, seen.owner.expand(len(seen.owner), -1), seen.cost, "amin")
    earlier = torch.arange(count)[None] < seen.owner[:, None]
    nearest = nearest.where(earlier, float("inf"))
    candidates = (seen.cost.isfinite() & (seen.owner[None] < seen.owner[:, None])).sum(dim=1).clamp(min=1)
    if not len(seen.usual):
        return torch.zeros_like(nearest)
    at = (FALSE / candidates * len(seen.usual)).long().clamp(max=len(seen.usual) - 1)
    return (seen.usual[at][:, None] - nearest).clamp(min=0)


def _next(alike: Tensor, owner: Tensor, sizes: Tensor, start: int, ends: Sequence[bool]) -> int | None:
    """Return the observation that begins the next pass after `start`, or None."""
    count = len(sizes)
    if start + 1 >= count:
        return None
    position = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    since = alike.flip(1).cummax(dim=1).values.flip(1)  # since[t, i]: with observation i or a later one
    before = alike[:, start:].cummax(dim=1).values  # before[t, i]: with observations start to start + i
    usual = alike[alike > 0].mean().nan_to_num() if bool((alike > 0).any()) else torch.zeros(())
    scores, holds = torch.full((count,), -1.0), torch.zeros(count, dtype=torch.bool)
    for i in range(start + 1, count):
        low = int(position[i])
        high = min(2 * low - int(position[start]), len(owner))
        old = before[low:high, i - 1 - start]
        own = since[low:high, i]
        scores[i] = (old - own).sum() - NEWS * usual * (old <= own).sum()
        again = int((old > own).sum()) - int((own > old).sum())
        holds[i] = again >= LEAST and again >= SHARE * (high - low)
    scores = scores.where(holds, -1.0)
    good = ((scores > NEAR_BEST * scores.max()) & holds).nonzero().flatten().tolist()
    if told := [i for i in good if ends[i - 1]]:
        return int(told[0])
    before_double = [i for i in good if position[i] - position[start] < 1.5 * (position[good[0]] - position[start])]
    return max(before_double, key=lambda i: float(scores[i]), default=None)


def _cut(sizes: Tensor, start: int, examples: int) -> list[int]:
    """Return where passes of `examples` begin after `start`, as long as their ends lie between observations."""
    found, filled = [], 0
    for i in range(start, len(sizes)):
        if filled == examples:
            found.append(i)
            filled = 0
        filled += int(sizes[i])
        if filled > examples:
            break
    return found
