"""Groups of updates of one client whose senders are not known, and groups of examples of one client in secure sums.

Updates of one client share examples from epoch to epoch. Updates of different clients do not, unless two clients hold the same
example. The numbers of shared examples follow from the row spaces of the first layer's updates, without labels or names.

Examples are grouped as by Marchand et al. 2023, "SRATTA", section 4. All clients of a round start from the same weights. A neuron
that is off for an example at these weights, but has the example in its row of the update, was turned on by a step on other
examples of the same client. Let the row consist of recovered examples only, and let the neuron be on for a single example A of
them at the weights sent. If the change of the weights by A is large enough to turn the neuron on for another example B of the
row, A and B belong to the same client.

The paper also links examples that a neuron's row lacks although it is on for them at the weights sent. This rule is left out: the
shares of examples that the network classifies well are too small to be told from zero, and such links were often wrong.
"""

from collections.abc import Sequence

import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from attacker.attacks.multi_round.spans.intersections import RecoveredExamples
from attacker.attacks.multi_round.spans.relu_zeros import ZERO_LEVEL
from attacker.attacks.multi_round.spans.row_space import RowSpace, compute_threshold

MAX_ERROR = 10.0
"""Largest error of a row that errors of the recovered examples may cause, in units of the row's own noise. Rows with a larger
error are not used."""
MIN_COSINE = 1e-5
"""Smallest cosine between an example and a neuron's weights, in magnitude, from which the neuron's state is known."""


def group_updates(spaces: Sequence[RowSpace], shared: Tensor, rounds: Sequence[int]) -> list[list[int]]:
    """Return groups of updates that appear to be of one client each, the largest group first.

    A group is a list of indices of updates, sorted by their rounds. An update is a group of its own if it shares no example with
    another update, or if it has full rank, since it then shares dimensions with any other.
    shared: as `row_space.count_all_shared` returns it. rounds: the round of each update.
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


def group_by_client(
    found: RecoveredExamples, spaces: Sequence[RowSpace], sent: Sequence[Tensor], clients: Sequence[int]
) -> list[list[int]]:
    """Return groups of at least two examples that belong to one client each, as indices of `found`.

    spaces: row spaces of the sums. sent: [W, b] (width, F) of the layer, as it was sent in the round of each sum. clients: number
    of clients of each sum; a recorded sum is the mean of their updates. The clients take several local steps of SGD without
    weight decay, which would turn neurons off by itself.
    """
    links: list[tuple[int, int]] = []
    for t, (space, forward, count) in enumerate(zip(spaces, sent, clients, strict=True)):
        held = [i for i, holders in enumerate(found.holders) if t in holders]
        if len(held) > 1 and not space.saturated:
            links += [(held[i], held[j]) for i, j in link_examples(found.vectors[held], space, forward, count)]
    if not links:
        return []
    first, second = zip(*links, strict=True)
    shape = (len(found.vectors), len(found.vectors))
    labels = connected_components(coo_matrix(([1] * len(links), (first, second)), shape=shape), directed=False)[1]
    groups: dict[int, list[int]] = {}
    for example, label in enumerate(labels.tolist()):
        groups.setdefault(label, []).append(example)
    return [group for group in groups.values() if len(group) > 1]


def link_examples(vectors: Tensor, space: RowSpace, forward: Tensor, clients: int) -> list[tuple[int, int]]:
    """Return pairs of examples of a sum that belong to the same client, as pairs of indices of rows of `vectors`.

    The first and the second example belong to the same client if there is a neuron for which all of this holds: the neuron is off
    for the second example at the weights sent; the neuron's row of the update contains the second example; the first is the only
    example in the row for which the neuron is not off; the change of the weights by the first is large enough to turn the neuron
    on for the second.
    vectors: (n, F) multiples of [x, 1] in the sum's row space, in units of noise. forward: [W, b] (width, F) that was sent.
    clients: number of clients of the sum.
    """
    x = vectors / vectors[:, -1:]
    inverse = torch.linalg.pinv(x)
    rows = space.coordinates @ space.basis
    shares = rows @ inverse
    level = space.noise.clamp(min=torch.finfo(rows.dtype).tiny)
    error = level + shares.abs() @ vectors[:, -1].abs().reciprocal()
    left = (rows - shares @ x).norm(dim=1)
    explained = (left <= compute_threshold(rows.shape[1]) * level) & (error <= MAX_ERROR * level)
    active = shares.abs() > ZERO_LEVEL * error[:, None] * inverse.norm(dim=0)
    before, overlap = forward @ x.T, x @ x.T
    cosine = before / torch.outer(forward.norm(dim=1).clamp(min=torch.finfo(rows.dtype).tiny), x.norm(dim=1))
    links: list[tuple[int, int]] = []
    for neuron in explained.nonzero()[:, 0].tolist():
        turned_on = active[neuron] & (cosine[neuron] < -MIN_COSINE)
        movers = (active[neuron] & ~turned_on).nonzero()[:, 0].tolist()
        if len(movers) == 1:
            after = before[neuron] + clients * shares[neuron, movers[0]] * overlap[movers[0]]
            links += [(movers[0], other) for other in (turned_on & (after > 0)).nonzero()[:, 0].tolist()]
    return links
