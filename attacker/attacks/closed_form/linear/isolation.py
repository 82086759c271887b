"""Isolated examples: if only one example activates a neuron, that neuron's row of [dL/dW, dL/db] is a multiple of [x, 1]."""

from dataclasses import dataclass, replace

import torch
from scipy.optimize import nnls
from torch import Tensor

from attacker.attacks.closed_form.linear.layer_gradient import UNSCALED, LayerGradient, LinearAnswer, join_notes
from attacker.attacks.closed_form.linear.low_rank import NOISE_LEVEL, SUM_ROUNDING
from attacker.attacks.closed_form.linear.single_example import SINGLE_NEURON_CERTAINTY

MAX_DEVIATIONS = 100.0
"""Largest distance of equal directions, in standard deviations of noise, if it is also below `MAX_CLOSE_DISTANCE`."""
MAX_CLOSE_DISTANCE = 1e-5
"""Largest distance of unit directions up to which `MAX_DEVIATIONS` applies."""
MAX_DISTANCE = 0.02
"""Largest distance of equal unit directions, for any noise."""
MAX_MIXTURE_DISTANCE = 1e-4
"""Largest distance of a vector to a combination of others, relative to its length, at which it counts as their mixture."""
MIN_SUPPORT_DISTANCE = 0.02
"""Smallest distance, relative to a vector's length, of other vectors that it may be a mixture of; nearer ones count as copies."""
NEAR_RADII = (3.0, 10.0, 30.0, 100.0, 300.0)
"""Distances, as multiples of the largest one of equal directions, within which nearly parallel rows are counted."""
MAX_DIFFERENCE_DISTANCE = 1e-3
"""Distance of unit directions below which it is computed from their difference instead of their cosine."""
ROWS_PER_CHUNK = 512
"""Number of rows that are compared with all rows at once."""
PAIRS_PER_CHUNK = 4096
"""Number of pairs of rows whose differences are computed at once."""


@dataclass(frozen=True)
class Groups:
    """Groups of parallel rows: unit directions (K, F), and the number of rows of each (K,), descending.

    chance: (K,) rough estimate of the number of rows in each group if all rows had random directions, or were spread evenly among
            those close to the group.
    crowded: mask (K,) of the groups to which other rows are close, though not parallel, as the rows of several examples may be.
    mixed:  mask (K,) of the groups that are known to be mixtures of examples; None if this was not examined.
    """

    directions: Tensor
    count: Tensor
    chance: Tensor
    crowded: Tensor
    mixed: Tensor | None = None

    @property
    def confirmed(self) -> Tensor:
        """Mask (K,) of the groups of at least two rows whose number of rows, less one, exceeds 5 times `chance`.

        Groups in `mixed` are left out.
        """
        several = (self.count > 1) & (self.count - 1 > 5 * self.chance)
        return several if self.mixed is None else several & ~self.mixed


def group_parallel_rows(rows: Tensor, noise: Tensor, live: Tensor) -> Groups:
    """Group the rows (M, F) that are parallel up to sign and noise.

    noise: (M,) standard deviation of the noise of each value of a row. live: (M,) mask of the rows to use.
    """
    kept, level = rows[live], noise[live]
    if not len(kept):
        none = torch.zeros(0, dtype=torch.long, device=rows.device)
        return Groups(rows.new_zeros(0, rows.shape[1]), none, rows.new_zeros(0), none.bool())
    length = kept.norm(dim=1)
    unit, error = kept / length[:, None], level * rows.shape[1] ** 0.5 / length
    near, close = _compare_directions(unit, error)
    return _group_greedily(unit, error, near, close)


def _compare_directions(unit: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Return which pairs of rows are parallel, a mask (M, M), and the result of `_count_neighbours_by_chance` for all rows, (M,).

    unit, error: as for `_group_greedily`.
    """
    near, close = [], []
    for start in range(0, len(unit), ROWS_PER_CHUNK):
        part = slice(start, start + ROWS_PER_CHUNK)
        tolerance = _compute_tolerance(error[part, None], error)
        radius = _compute_distances(unit[part], unit) / tolerance
        near.append(radius <= 1)
        close.append(_count_neighbours_by_chance(radius))
    return torch.cat(near), torch.cat(close)


def _compute_distances(rows: Tensor, others: Tensor) -> Tensor:
    """Return the distances (K, M) of unit vectors (K, F) and (M, F), each up to sign: of the nearer of a vector and its negative.

    Distances from cosines lose digits where they are small, so that small ones are computed from differences.
    """
    cosine = rows.double() @ others.double().T
    distance = (2 - 2 * cosine.abs()).clamp(min=0).sqrt()
    first, second = (distance < MAX_DIFFERENCE_DISTANCE).nonzero(as_tuple=True)
    for start in range(0, len(first), PAIRS_PER_CHUNK):
        a, b = first[start : start + PAIRS_PER_CHUNK], second[start : start + PAIRS_PER_CHUNK]
        side = torch.sign(cosine[a, b])[:, None].to(rows)
        distance[a, b] = (rows[a] - side * others[b]).norm(dim=1).double()
    return distance.to(rows)


def _group_greedily(unit: Tensor, error: Tensor, near: Tensor, close: Tensor) -> Groups:
    """Group rows greedily: repeatedly form a group of the row with most neighbours left and these neighbours.

    unit: rows as unit vectors (M, F). error: (M,) standard deviation of each row's direction. near: (M, M) mask of the pairs that
    are parallel up to noise, the neighbours. close: (M,) result of `_count_neighbours_by_chance`.
    """
    free = torch.ones(len(unit), dtype=torch.bool, device=unit.device)
    directions, counts, chances, crowded = [], [], [], []
    while bool(free.any()):
        neighbours = (near & free).sum(dim=1) * free
        centre = neighbours.argmax()
        if int(neighbours[centre]) == 1:  # no two of the rows that are left are parallel
            directions += list(unit[free])
            counts += [1] * int(free.sum())
            by_chance = _compute_tolerance(error[free][:, None], error[free]).pow(unit.shape[1] - 1).sum(dim=1)
            chances += list(torch.maximum(by_chance, close[free]))
            crowded += (close[free] > 0).tolist()
            break
        members = near[centre] & free
        weight = 1 / error[members].clamp(min=torch.finfo(unit.dtype).tiny).square()
        side = torch.sign(unit[members] @ unit[members][0])
        mean = ((weight * side / weight.max())[:, None] * unit[members]).sum(dim=0)
        directions.append(mean / mean.norm())
        counts.append(int(members.sum()))
        by_chance = (_compute_tolerance(error[centre], error[free]) ** (unit.shape[1] - 1)).sum()
        chances.append(torch.maximum(by_chance, close[centre]))
        crowded.append(bool(close[centre] > 0))
        free = free & ~members
    crowds = torch.tensor(crowded, device=unit.device)
    return Groups(torch.stack(directions), torch.tensor(counts, device=unit.device), torch.stack(chances), crowds)


def _count_neighbours_by_chance(radius: Tensor) -> Tensor:
    """Return for each of K rows how many pairs of the rows close to it are expected to be parallel by chance, (K,).

    The rows of neurons that several examples turn on may differ in little but the ratio of two examples, so that they lie close
    to each other on a line. Those that are not parallel, but within several multiples of the tolerance, are counted, and taken to
    be evenly spread: of n rows on a line of r tolerances, n^2 / r pairs are parallel. The largest result for all r in NEAR_RADII
    is returned.
    radius: (K, M) distances of the K rows to all M rows, as multiples of the largest distance of equal directions.
    """
    outside = radius > 1
    pairs = [(outside & (radius <= near)).sum(dim=1).to(radius).square() / near for near in NEAR_RADII]
    return torch.stack(pairs).amax(dim=0)


def _compute_tolerance(first: Tensor, second: Tensor) -> Tensor:
    """Return the largest distance at which unit directions whose noise has these standard deviations count as equal."""
    both = first.hypot(second)
    return torch.maximum(NOISE_LEVEL * both, (MAX_DEVIATIONS * both).clamp(max=MAX_CLOSE_DISTANCE)).clamp(max=MAX_DISTANCE)


def estimate_rounding(rows: Tensor) -> Tensor:
    """Return an estimate (M,) of the standard deviation of the rounding errors in rows (M, F) that were stored in float32."""
    return (SUM_ROUNDING * rows.square().mean(dim=1).sqrt()).clamp(min=torch.finfo(rows.dtype).tiny)


def select_independent(directions: Tensor, *, minimum: float = 1e-4) -> list[int]:
    """Return the indices, at most F, of those unit directions (K, F) that are independent of the selected ones before them.

    A direction is selected if its distance to all linear combinations of those selected before exceeds `minimum`.
    """
    selected: list[int] = []
    basis = directions.new_zeros(0, directions.shape[1])
    for i, direction in enumerate(directions):
        left = direction - basis.T @ (basis @ direction)
        if float(left.norm()) > minimum:
            left = left - basis.T @ (basis @ left)
            basis = torch.cat([basis, (left / left.norm())[None]])
            selected.append(i)
        if len(selected) == directions.shape[1]:
            break
    return selected


def find_mixtures(vectors: Tensor) -> Tensor:
    """Return a mask (K,) of the vectors [x, 1], given as (K, F), that are combinations of others with positive weights.

    If two examples have nearly the same errors at the network's outputs, as untrained networks have for examples of one class,
    the rows of neurons that both turn on are parallel up to rounding: the vector of these rows is the mean of both examples, and
    is itself no example.
    """
    mixed = torch.zeros(len(vectors), dtype=torch.bool, device=vectors.device)
    if len(vectors) < 3:
        return mixed
    coordinates = torch.linalg.qr(vectors.T, mode="r").R.T.cpu().numpy()
    length = vectors.norm(dim=1)
    far = (torch.cdist(vectors, vectors) > MIN_SUPPORT_DISTANCE * length[:, None]).cpu().numpy()
    for k, vector in enumerate(coordinates):
        if far[k].sum() >= 2:
            mixed[k] = nnls(coordinates[far[k]].T, vector)[1] <= MAX_MIXTURE_DISTANCE * float(length[k])
    return mixed


def recover_isolated(gradient: LayerGradient, examples: int | None, note: str) -> LinearAnswer:
    """Recover the examples that alone activate some neuron; the rank need not be known. note: copied to the answer."""
    groups = group_parallel_rows(gradient.rows, estimate_rounding(gradient.rows), gradient.rows.norm(dim=1) > 0)
    groups = mark_mixtures(gradient, groups, groups.directions)
    return recover_groups(gradient, groups.directions, groups, rank=0, examples=examples, note=note)


def mark_mixtures(gradient: LayerGradient, groups: Groups, directions: Tensor) -> Groups:
    """Return the groups with `mixed` set, for confirmed ones whose input lies between the inputs of other confirmed groups.

    Groups whose input has the values of an 8-bit image are not marked.
    directions: directions of the groups as rows of the gradient, (K, F'). Without a bias nothing is marked, since the norm of an
    input is then not known.
    """
    x, fits = gradient.compute_inputs(directions)
    mixed = torch.zeros_like(fits)
    if gradient.biased:
        known = (groups.confirmed & fits).nonzero()[:, 0]
        mixed[known] = find_mixtures(torch.cat([x[known], torch.ones_like(x[known, :1])], dim=1))
        mixed &= ~gradient.is_eight_bit(x)
    return replace(groups, mixed=mixed)


def recover_groups(
    gradient: LayerGradient, directions: Tensor, groups: Groups, *, rank: int, examples: int | None, note: str
) -> LinearAnswer:
    """Recover examples from K groups of parallel rows; at most `rank` and `examples` of them, if these are known.

    Only possible inputs (`LayerGradient.compute_inputs`) of groups with linearly independent directions are used. Inputs whose
    values are those of an 8-bit image come first. Next come the groups in `Groups.confirmed`, which have more rows than chance
    explains; if `LayerGradient.uniform` is set, these groups count as others. Others are used only if their input lies within the
    known bounds of the data, if no other row is nearly parallel, and if the group is not known to be a mixture of examples
    (`Groups.mixed`).
    directions: directions of the groups as rows of the gradient, (K, F'). rank: rank of the gradient; 0 if unknown. note: remark
    that is copied to the answer.
    """
    x, fits = gradient.compute_inputs(directions)
    stored = fits & gradient.is_eight_bit(x)
    mixed = torch.zeros_like(stored) if groups.mixed is None else groups.mixed
    first = torch.argsort(stored.long() - mixed.long(), descending=True, stable=True)
    chosen = first[select_independent(directions[first])]
    x, fits, stored = x[chosen], fits[chosen], stored[chosen]
    several = groups.confirmed[chosen] & fits & ~stored & (not gradient.uniform)
    lone = ~stored & ~several & fits & gradient.is_within_bounds(x) & ~(groups.crowded | mixed)[chosen]
    maximum = min(rank or len(x), examples or len(x))
    order = torch.cat([mask.nonzero()[:, 0] for mask in (stored, several, lone)])[:maximum]
    agreeing = groups.count[chosen].clamp(min=2).double()
    certainty = torch.where(several, 1 - 0.1 ** (agreeing - 1), SINGLE_NEURON_CERTAINTY).masked_fill(stored, 1.0)[order]
    total = rank or examples or "unknown"
    text = "no neuron is known to be activated by a single example only"
    if len(order):
        text = f"{len(order)} of {total} examples were found, each alone in activating a neuron"
    return LinearAnswer(
        x=x[order], d=x.new_zeros(len(order), len(gradient.rows)), certainty=certainty, rank=rank,
        how="isolated" if len(order) else "", note=join_notes(note, text, "" if gradient.biased or not len(order) else UNSCALED),
        scaled=gradient.biased,
    )  # fmt: skip
