"""Grouping of updates whose senders are not known, by the examples that they have in common.

Updates of one client share examples from epoch to epoch; those of different clients do not, unless two of them hold the same one.
The numbers of shared examples follow from the row spaces of the first layer's updates, without labels or names.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from attacker.attacks.base import Case
from attacker.attacks.multi_round.spans.attack import compute_spaces, require_input_layer
from attacker.attacks.multi_round.spans.recovery import count_all_shared
from fedsim.recording.observation import Observation


def group_observations(observations: Sequence[Observation], rng: Generator, device: str = "cpu") -> list[tuple[Observation, ...]]:
    """Return groups of observations that appear to be of one client each, every group sorted by round, the largest first.

    The names of their clients are not used. An observation that shares no example with another one is a group of its own.
    Raises ValueError if the model has no linear layer that sees the examples, or if clients do not train it by SGD, so that the
    rows of its updates are not linear combinations of its inputs.
    """
    if not observations:
        return []
    spaces = compute_spaces(Case(tuple(observations)), require_input_layer(observations[0]), rng, device=device)
    saturated = torch.tensor([space.saturated for space in spaces])
    shared = count_all_shared(spaces, rng).masked_fill(saturated[:, None] | saturated[None], 0)
    groups = group_rounds(shared, [observation.round for observation in observations])
    return [tuple(observations[i] for i in group) for group in groups]


def group_rounds(shared: Tensor, rounds: Sequence[int]) -> list[list[int]]:
    """Return groups of updates that share examples, as indices in the order of `rounds`, the largest group first.

    Pairs that share the most examples are joined first. A pair is not joined if that would put two updates of one round into a
    group, since a client sends one a round.
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
    found = [sorted(own, key=lambda i: rounds[i]) for own in members.values()]
    return sorted(found, key=lambda own: (-len(own), own))
