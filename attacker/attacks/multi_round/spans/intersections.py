"""Examples as one-dimensional intersections of the row spaces of a client's updates.

The row spaces of two batches that share exactly one example x intersect, in general, in the multiples of [x, 1], which give the
example once the last entry is scaled to 1. If two batches share several examples, a third one that holds only one of them is
intersected as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.multi_round.spans.layer_updates import LayerUpdates
from attacker.attacks.multi_round.spans.row_space import Intersection, RowSpace, compute_threshold, intersect

RANGE_SLACK = 0.02
"""Largest distance of an example's values to [0, 1], in addition to the example's estimated error."""
MAX_SCREENED_DISTANCE = 0.1
"""A unit vector is tested for membership in a row space only if the norm of its part outside of that space is below this, and
two unit vectors are compared only if their distance is."""
MAX_EQUAL_DISTANCE = 1e-4
"""Largest distance of unit vectors of the same example, whatever their estimated errors."""
MAX_MEMBERS = 8
"""Largest number of row spaces that are intersected to isolate an example."""


@dataclass(frozen=True)
class RecoveredExamples:
    """Examples recovered from row spaces, as vectors in units of noise (see `row_space`).

    vectors: (N, F) multiples of [x, 1] whose entries have noise of standard deviation 1.
    clearance: (N,) how clearly each example stands out from noise. It is the ratio `next / largest` of the `Intersection` behind
               the example, or the largest ratio of several intersections. Examples on other evidence have fixed values: infinite
               if the evidence is certain, PARALLEL_CLEARANCE for parallel rows, and 0 if the evidence is doubtful.
    holders: for each example, the indices of the row spaces that contain it, ascending.
    """

    vectors: Tensor
    clearance: Tensor
    holders: tuple[tuple[int, ...], ...]

    @property
    def error(self) -> Tensor:
        """Estimated standard deviation (N,) of the entries of [x, 1]."""
        return self.vectors[:, -1].abs().reciprocal()

    @classmethod
    def none(cls, features: int) -> "RecoveredExamples":
        """Return no examples. features: F, the length of their vectors."""
        return cls(torch.zeros(0, features, dtype=torch.float64), torch.zeros(0, dtype=torch.float64), ())

    def add(self, vectors: Tensor, clearance: Tensor | float, spaces: Sequence[RowSpace]) -> "RecoveredExamples":
        """Return these examples and those of vectors (M, F), either sign, with clearances (M,), each example once.

        `holders` are determined anew, among the row spaces `spaces`.
        """
        if not len(vectors):
            return self
        clearance = torch.as_tensor(clearance, dtype=torch.float64).expand(len(vectors))
        merged, clearance = merge_equal(
            torch.cat([self.vectors, vectors * torch.sign(vectors[:, -1:])]), torch.cat([self.clearance, clearance])
        )
        return RecoveredExamples(merged, clearance, find_holders(merged, spaces))


def recover(updates: LayerUpdates, shared: Tensor) -> RecoveredExamples:
    """Return the plausible examples that are one-dimensional intersections of two to MAX_MEMBERS row spaces, each once.

    Pairs of spaces that share one dimension come first. A pair that shares several dimensions is intersected with further spaces
    only if fewer examples of the pair are known than the pair shares, so that the cost grows with the number of pairs.
    shared: as `count_all_shared` returns it.
    """
    spaces, features = updates.spaces, len(updates.limits[0]) + 1
    pairs = [(i, j) for i, j in torch.combinations(torch.arange(len(spaces))).tolist() if shared[i, j]]
    lines = [intersect(spaces[i].y, spaces[j].y) for i, j in pairs if shared[i, j] == 1]
    found = _collect_examples([line for line in lines if bool(mark_plausible(line.y, updates.limits))], spaces, features)
    fresh: list[Intersection] = []
    unit = found.vectors / found.vectors.norm(dim=1, keepdim=True)
    held = _mark_holders(found.holders, len(spaces))
    for i, j in sorted((pair for pair in pairs if shared[pair] > 1), key=lambda pair: int(shared[pair])):
        if int((held[:, i] & held[:, j]).sum()) >= shared[i, j]:
            continue
        lines = _split_into_lines(intersect(spaces[i].y, spaces[j].y), spaces, shared, (i, j))
        for line in (line for line in lines if bool(mark_plausible(line.y, updates.limits))):
            fresh.append(line)
            vector = line.y[0] / line.y[0].norm()
            if not bool(((unit @ vector).abs() > 1 - MAX_SCREENED_DISTANCE**2 / 2).any()):
                unit = torch.cat([unit, vector[None]])
                held = torch.cat([held, _mark_holders(find_holders(line.y[:1], spaces), len(spaces))])
    more = _collect_examples(fresh, spaces, features)
    return found.add(more.vectors, more.clearance, spaces)


def _collect_examples(lines: Sequence[Intersection], spaces: Sequence[RowSpace], features: int) -> RecoveredExamples:
    """Return the different examples behind one-dimensional intersections. features: F, the length of their vectors."""
    nothing = RecoveredExamples.none(features)
    if not lines:
        return nothing
    clearances = [line.next / max(line.largest, torch.finfo(torch.float64).eps) for line in lines]
    return nothing.add(torch.cat([line.y for line in lines]), torch.tensor(clearances, dtype=torch.float64), spaces)


def _mark_holders(holders: Sequence[Sequence[int]], spaces: int) -> Tensor:
    """Return a mask (N, spaces) of the row spaces that contain each of N examples."""
    mask = torch.zeros(len(holders), spaces, dtype=torch.bool)
    for example, places in enumerate(holders):
        mask[example, list(places)] = True
    return mask


def _split_into_lines(
    common: Intersection, spaces: Sequence[RowSpace], shared: Tensor, members: tuple[int, ...]
) -> list[Intersection]:
    """Return `common` if it is one-dimensional, else its one-dimensional intersections with further spaces.

    common: the intersection of the spaces with the indices `members`. shared: numbers of shared examples of all pairs of spaces.
    Only spaces after the last member are tried, so that every set of spaces is met once.
    """
    if len(common.y) == 1:
        return [common]
    lines = []
    for k in range(members[-1] + 1, len(spaces)):
        if not bool((shared[list(members), k] > 0).all()):
            continue
        further = intersect(common.y, spaces[k].y)
        if 0 < len(further.y) < len(common.y) and len(members) < MAX_MEMBERS:
            lines += _split_into_lines(further, spaces, shared, (*members, k))
    return lines


def mark_plausible(vectors: Tensor, limits: tuple[Tensor, Tensor]) -> Tensor:
    """Return a mask (N,) of the vectors (N, F) that can be multiples of [x, 1] of examples x, with noise of standard deviation 1.

    A vector can be one if its last entry, the factor of [x, 1], is above the noise, and the entries of x are within the
    limits of the data (`LayerUpdates.limits`), with a tolerance of six standard deviations and RANGE_SLACK of their distance.
    """
    low, high = limits
    scale, features = vectors[:, -1:], vectors.shape[1]
    x, error = vectors[:, :-1] / scale, 6 / scale.abs()
    slack = RANGE_SLACK * (high - low) + error * (1 + x.abs())
    plausible: Tensor = ((x >= low - slack) & (x <= high + slack)).all(dim=1)
    plausible &= scale[:, 0].abs() >= compute_threshold(features) / features**0.5
    return plausible


def merge_equal(vectors: Tensor, clearance: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors (M, F) in units of noise of which no two have the same direction, and their clearances (M,).

    Two vectors have the same direction if a combination of both is noise only, or if they hardly differ. Opposite directions
    differ.
    Of several vectors with the same direction, the most precise one is kept, with the largest clearance of all of them.
    """
    order = vectors.norm(dim=1).argsort(descending=True).tolist()
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    threshold = compute_threshold(vectors.shape[1])
    kept: list[int] = []
    best: dict[int, float] = {}
    for i in order:
        near = (unit[kept] @ unit[i]).clamp(max=1) if kept else vectors.new_zeros(0)
        same = -1
        for place in (near > 1 - MAX_SCREENED_DISTANCE**2 / 2).nonzero()[:, 0].tolist():
            two = torch.stack([vectors[kept[place]], vectors[i]])
            if near[place] > 1 - MAX_EQUAL_DISTANCE**2 / 2 or float(torch.linalg.svdvals(two)[-1]) <= threshold:
                same = place
                break
        if same < 0:
            kept.append(i)
            best[i] = float(clearance[i])
        else:
            best[kept[same]] = max(best[kept[same]], float(clearance[i]))
    return vectors[kept], torch.tensor([best[i] for i in kept], dtype=clearance.dtype)


def find_holders(vectors: Tensor, spaces: Sequence[RowSpace]) -> tuple[tuple[int, ...], ...]:
    """Return for each vector (N, F), in units of noise, the indices of the row spaces that contain it.

    A saturated space may contain any vector. It counts as containing a vector only if one of the update's rows, from which the
    space was computed, is parallel to it.
    """
    if not len(vectors):
        return ()
    held = torch.stack([_is_in_space(vectors, space) for space in spaces], dim=1)
    return tuple(tuple(row.nonzero()[:, 0].tolist()) for row in held)


def _is_in_space(vectors: Tensor, space: RowSpace) -> Tensor:
    """Return a mask (N,) of the vectors (N, F), in units of noise, that a row space contains.

    A saturated space contains a vector if a row of the update is parallel to it: at a distance of less than MAX_EQUAL_DISTANCE
    between unit vectors, up to sign.
    Any other space contains a vector v if the smallest singular value of Y and v stacked is at most the threshold t, and v's
    length o outside of the space is less than MAX_SCREENED_DISTANCE times the length of v. The rows of Y are orthogonal, with
    lengths s above t. With v's coordinates b along them, the singular value is at most t if and only if
    o^2 <= t^2 (1 + sum_i b_i^2 / (s_i^2 - t^2)), by the secular equation of the stack's eigenvalues.
    """
    inside = vectors @ space.basis.T
    if space.saturated:
        rows = space.coordinates / space.coordinates.norm(dim=1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny)
        cosine: Tensor = (inside @ rows.T).abs().amax(dim=1) / vectors.norm(dim=1)
        return cosine > 1 - MAX_EQUAL_DISTANCE**2 / 2
    noise = compute_threshold(vectors.shape[1]) ** 2
    outside = (vectors - inside @ space.basis).square().sum(dim=1)
    spread = (inside.square() / (space.y.square().sum(dim=1) - noise).clamp(min=torch.finfo(vectors.dtype).tiny)).sum(dim=1)
    near: Tensor = outside < MAX_SCREENED_DISTANCE**2 * vectors.square().sum(dim=1)
    return near & (outside <= noise * (1 + spread))
