"""Grouping of updates whose senders are not known, by the examples that they have in common.

Updates of one client share examples from epoch to epoch. Updates of different clients do not, unless two clients hold the same
example.
The numbers of shared examples follow from the row spaces of the first layer's updates, without labels or names.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attacker.attacks.multi_round.spans.row_space import RowSpace


def group_updates(spaces: Sequence[RowSpace], shared: Tensor, rounds: Sequence[int]) -> list[list[int]]:
    """Return groups of updates that appear to be of one client each, the largest group first.

    A group is a list of indices of updates, sorted by their rounds. An update is a group of its own if it shares no example with
    another update, or if it has full rank, since it then shares dimensions with any other.
    shared: as `recovery.count_all_shared` returns it. rounds: the round of each update.
    """
    saturated = torch.tensor([space.saturated for space in spaces])
    return group_rounds(shared.masked_fill(saturated[:, None] | saturated[None], 0), rounds)


def group_rounds(shared: Tensor, rounds: Sequence[int]) -> list[list[int]]:
    """Return groups of updates that share examples, the largest group first.

    A group is a list of indices of updates, sorted by their rounds. Pairs of updates that share the most examples are joined
    first. A pair is not joined if that would put two updates of one round into a group, since a client sends one update per
    round.
    shared: numbers of shared examples, (N, N), as `count_all_shared` returns them. rounds: the round of each update.
    """
    group = list(range(len(rounds)))
    members = {i: [i] for i in group}
    upper = shared.triu(1)
    pairs = upper.nonzero()
    for i, j in pairs[upper[pairs[:, 0], pairs[:, 1]].argsort(descending=True, stable=True)].tolist():
        one, other = group[i], group[j]
        if one == other or {rounds[k] for k in members[one]} & {rounds[k] for k in members[other]}:
            continue
        for k in members[other]:
            group[k] = one
        members[one] += members.pop(other)
    found = [sorted(updates, key=lambda i: rounds[i]) for updates in members.values()]
    return sorted(found, key=lambda updates: (-len(updates), updates))
