"""Distances between examples of different rounds, and matching of pairs of low distance, with its certainty."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

Filter = Literal["own", "lists", "none"]
"""Rule that selects by labels the pairs of examples that can be the same: pairs with equal labels ("own"), all pairs of two
observations that have a label in common ("lists"), or all pairs ("none")."""
Pairs = list[tuple[int, int]]

IMPOSSIBLE_COST = float("inf")
"""Cost of an impossible pair."""
NEIGHBOUR_COUNT = 64
"""Number of examples, nearest in time, from which the covariance of features is estimated. More would include rounds with
different weights."""
RIDGE = 0.75
"""Share of the neighbours' mean variance that is added to all variances before whitening."""


def pool(x: Tensor) -> Tensor:
    """Return images (N, C, H, W) averaged over 2x2 pixels, whose rest is left out (AGIC, IV-B); rows (N, F) unchanged."""
    return torch.nn.functional.avg_pool2d(x, min(2, *x.shape[-2:])) if x.ndim == 4 else x


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return mean squared differences (N, M) of a (N, *shape) and b (M, *shape)."""
    a, b = a.flatten(1).double(), b.flatten(1).double()
    return torch.cdist(a, b).square() / a.shape[1]


def cosine_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 - cosine, (N, M), of the rows of a (N, F) and b (M, F); 1 for a row of zeros."""
    normal = torch.nn.functional.normalize
    return 1 - normal(a.double(), dim=1) @ normal(b.double(), dim=1).T


def make_comparable(
    features: Sequence[Tensor], references: Sequence[Tensor | None], *, towards_plain: float = 3.0
) -> list[Tensor]:
    """Return the features of rounds with different weights, whitened so that their cosine distinguishes examples, as a list.

    features: (N_o, F) for each round, sorted by round. references: (P, F) features of the attacker's own inputs at the weights of
    each round, or None.

    First, each round that has a reference is centred and whitened by the mean and covariance of the reference. `towards_plain`
    times the mean variance is added to all variances, so that with a large `towards_plain` whitening changes little but the
    scale.

    Then each round is centred and whitened by about NEIGHBOUR_COUNT examples of the nearest rounds, its own included. `RIDGE`
    times the mean variance of these examples within the dimensions that they span is added to all variances. With too small a
    ridge, all neighbours would become nearly orthogonal, including equal ones. A single example without neighbours is left as it
    is.
    """
    plain = [
        f.double() if r is None else _whiten(f.double(), r.double(), towards_plain)
        for f, r in zip(features, references, strict=True)
    ]
    starts = torch.tensor([0, *map(len, plain)]).cumsum(0).tolist()
    everything = torch.cat(plain) if plain else torch.empty(0, 0)
    result = []
    for start, stop in pairwise(starts):
        low = max(0, min((start + stop - NEIGHBOUR_COUNT) // 2, len(everything) - NEIGHBOUR_COUNT))
        near = everything[low : max(stop, low + NEIGHBOUR_COUNT)]
        spanned = min(len(near) - 1, near.shape[1])
        result.append(_whiten(everything[start:stop], near, RIDGE * near.shape[1] / spanned) if spanned else near)
    return result


def _whiten(x: Tensor, reference: Tensor, added: float) -> Tensor:
    """Return x (N, F), centred by the mean of `reference` (M, F) and whitened by its covariance plus a floor.

    The floor, `added` times the mean variance of the reference, is added to all variances. If `added` is 0, x is only centred.
    """
    mean = reference.mean(dim=0)
    _, s, vh = torch.linalg.svd(reference - mean, full_matrices=False)
    variances = s.square() / len(reference)
    floor = added * variances.sum() / reference.shape[1]
    if not float(floor):
        return x - mean
    inside = (x - mean) @ vh.T
    along = inside * ((variances + floor).rsqrt() - floor.rsqrt())
    white: Tensor = along @ vh + (x - mean) * floor.rsqrt()
    return white


def is_possible_pair(a: Tensor, b: Tensor, rule: Filter, owners: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return a mask (N, M) of the pairs of examples with labels a (N,) and b (M,) that can be the same.

    rule:   "own" allows pairs with equal labels. "lists" allows all pairs of two observations that have a label in common; it is
            for labels that are known to occur in an observation, but not at which of its places (AGIC, IV-B). "none" (no filter)
            allows all pairs.
    owners: the indices of the examples' observations, (N,) and (M,); needed only for "lists", which raises ValueError without
            them.
    """
    equal = a[:, None] == b[None]
    if rule == "none":
        return torch.ones_like(equal)
    if rule == "own":
        return equal
    if owners is None:
        raise ValueError("the filter 'lists' needs the argument owners: for each example, the index of its observation")
    rows, at = torch.unique(owners[0], return_inverse=True)
    theirs, where = torch.unique(owners[1], return_inverse=True)
    members = torch.nn.functional.one_hot(at, len(rows)).double()
    others = torch.nn.functional.one_hot(where, len(theirs)).double()
    share = members.T @ equal.double() @ others > 0
    return share[at][:, where]


def match_greedily(cost: Tensor) -> Pairs:
    """Return pairs (row, column) of a cost matrix (N, M), chosen greedily by ascending cost (AGIC, section IV-B).

    A pair is chosen if its cost is finite, and neither its row nor its column belongs to a pair chosen before. The result is
    sorted by row.
    """
    pairs: Pairs = []
    rows, columns = set[int](), set[int]()
    finite = int(cost.isfinite().sum())
    for flat in cost.flatten().argsort(stable=True)[:finite].tolist():
        row, column = divmod(flat, cost.shape[1])
        if row not in rows and column not in columns:
            pairs.append((row, column))
            rows.add(row)
            columns.add(column)
    return sorted(pairs)


def match_optimally(cost: Tensor) -> Pairs:
    """Return one-to-one pairs (row, column) of a cost matrix (N, M), as many of finite cost as possible.

    Of these, the pairs with the smallest total cost are chosen.
    """
    if not cost.numel() or not bool(cost.isfinite().any()):
        return []
    finite = cost[cost.isfinite()]
    beyond = float(finite.max()) + (float(finite.max() - finite.min()) + 1) * min(cost.shape)
    ready = cost.nan_to_num(nan=beyond, posinf=beyond)
    rows, columns = linear_sum_assignment(ready.double().numpy())
    pairs = zip(rows.tolist(), columns.tolist(), strict=True)
    return [(row, column) for row, column in pairs if bool(cost[row, column].isfinite())]


def compute_certainty(cost: Tensor, pairs: Pairs, usual: float) -> Tensor:
    """Return the certainty of each of `pairs`, in [0, 1]: 1 - cost of the pair / lowest cost of an alternative pair, at least 0.

    Alternatives of a pair are the pairs of its row or of its column that are not among `pairs`.
    cost:  (N, M), not negative.
    usual: typical cost of two different examples, to which the lowest cost of the alternatives is limited.
    """
    if not pairs:
        return torch.empty(0, dtype=torch.float64)
    rows, columns = torch.tensor(pairs).T
    matched = cost[rows, columns].double()
    others = cost.clone().double()
    others[rows, columns] = IMPOSSIBLE_COST
    second = torch.minimum(others.amin(dim=1)[rows], others.amin(dim=0)[columns]).clamp(max=usual)
    return (1 - matched / second).nan_to_num(nan=0.0).clamp(0, 1)
