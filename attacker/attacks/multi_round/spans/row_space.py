"""Row spaces of noisy matrices in units of their noise, and their intersections.

The row space of a matrix with F columns is represented by a matrix Y (rank, F) whose rows span it and whose entries have noise
of standard deviation 1, so that lengths are in units of noise. The length of a vector a^T Y with |a| = 1 therefore shows how well
the direction of this vector is known. A direction that two spaces share is a null vector of their stack: a^T Y1 + b^T Y2 is noise
only. Hence the dimension of an intersection is r1 + r2 - rank of the stack, with the rank counted above the noise. Unlike an
angle between spaces, this compares each direction with its own error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

OVERSAMPLING = 12
"""Number of directions beyond the largest possible rank that are computed, from which noise is estimated."""
MARGIN = 3.0
"""Length of a vector of noise, in units of its expected length, up to which it counts as noise."""
PAIRS_PER_CHUNK = 256
"""Number of pairs of row spaces that are stacked at once."""
SKETCH_FACTOR = 8
"""Dimensions of the common random projection in which all pairs are screened, per dimension of the largest row space."""
SCREEN_MARGIN = 2.0
"""Factor by which the threshold is larger while pairs are screened, since a projection changes lengths."""

MIN_GAP = 3.0
"""Smallest `RowSpace.gap` of a space that is taken to be whole although it has fewer dimensions than there are examples."""


@dataclass(frozen=True)
class RowSpace:
    """A row space in units of its noise.

    y:           (rank, F) orthogonal rows, longest first, with noise of standard deviation 1 per entry.
    coordinates: (width, rank), the rows of the matrix in terms of y, without scaling: matrix = coordinates @ unit rows of y.
    noise:       (width,) estimated standard deviation of the entries of each row of the matrix.
    gap:         length of the shortest row of y divided by the threshold below which a row counts as noise; 0 if y has no rows.
    saturated:   whether the matrix has full rank, that is as many dimensions as nonzero rows or as columns, so that there may be
                 more examples than dimensions.
    complete:    whether there are as many dimensions as examples, so that the space is the whole span of the examples. A smaller
                 space may hold a mixture of two examples in place of both.
    In results of `split_sums`, rows of y are not orthogonal, `coordinates` refer to another basis, and gap is 0.
    """

    y: Tensor
    coordinates: Tensor
    noise: Tensor
    gap: float
    saturated: bool
    complete: bool = False

    @property
    def rank(self) -> int:
        return len(self.y)

    @property
    def basis(self) -> Tensor:
        """The rows of y scaled to length 1, (rank, F)."""
        unit: Tensor = self.y / self.y.norm(dim=1, keepdim=True)
        return unit

    @property
    def is_whole(self) -> bool:
        """Whether the space is taken to be the span of all examples that left a trace in an update.

        It is if it is `complete`, or if none of its dimensions is nearly hidden by noise. If a dimension is nearly hidden, others
        are hidden entirely, and the rest of the span consists of mixtures. A space of rank 0 is not whole, nor is a saturated
        one, since there may then be more examples than dimensions.
        """
        return not self.saturated and bool(self.rank) and (self.complete or self.gap >= MIN_GAP)


def compute_row_space(rows: Tensor, noise: Tensor, max_rank: int | None, rng: Generator) -> RowSpace:
    """Return the row space of a matrix (width, F) of noisy rows.

    noise: (width,) lower estimate of the standard deviation of each row's entries. A larger estimate, from the components of rows
           outside of the `max_rank` strongest directions, replaces it. This second estimate is made only if there are at least
           `max_rank` + 2 columns and `max_rank` + 2 nonzero rows.
    max_rank:  largest possible rank, such as the number of examples; None if it is not known, and then `noise` is used as it is.
    rng:   used for large matrices, whose strongest directions are approximated.
    """
    live = rows.norm(dim=1) > 0
    kept, level = rows[live], noise[live].clamp(min=torch.finfo(rows.dtype).tiny)
    largest = min(kept.shape)
    if not largest:
        return RowSpace(rows.new_zeros(0, rows.shape[1]), rows.new_zeros(len(rows), 0), noise, 0.0, saturated=False)
    values, vectors = _decompose(kept / level[:, None], max_rank, rng)
    if max_rank is not None and max_rank + 2 <= largest:
        level = torch.maximum(level, _measure_noise(kept, vectors[:max_rank]))
        values, vectors = _decompose(kept / level[:, None], max_rank, rng)
    threshold = MARGIN * (len(kept) ** 0.5 + rows.shape[1] ** 0.5)
    rank = min(int((values > threshold).sum()), largest if max_rank is None else max_rank)
    whole = noise.clone()
    whole[live] = level
    basis = vectors[:rank]
    gap = float(values[rank - 1]) / threshold if rank else 0.0
    return RowSpace(values[:rank, None] * basis, rows @ basis.T, whole, gap, saturated=rank == largest, complete=rank == max_rank)


def _measure_noise(rows: Tensor, basis: Tensor) -> Tensor:
    """Return the standard deviation (width,) of the entries of each row, estimated from its part outside the span of `basis`."""
    spare = max(1, min(rows.shape) - len(basis)) * rows.shape[1] / min(rows.shape)
    left = rows - (rows @ basis.T) @ basis
    return (left.square().sum(dim=1) / spare).sqrt()


def _decompose(rows: Tensor, max_rank: int | None, rng: Generator) -> tuple[Tensor, Tensor]:
    """Return singular values, descending, and their right singular vectors, one per row.

    If `max_rank` + OVERSAMPLING is less than a third of the smaller side of the matrix, only so many are returned, the largest,
    approximated by subspace iteration. Otherwise, and if `max_rank` is None, all are returned.
    """
    count = min(rows.shape) if max_rank is None else max_rank + OVERSAMPLING
    if 3 * count >= min(rows.shape):
        values, vectors = torch.linalg.svd(rows, full_matrices=False)[1:]
        return values, vectors
    left = torch.randn(len(rows), count, generator=rng, dtype=rows.dtype).to(rows.device)
    for _ in range(2):
        right = torch.linalg.qr(rows.T @ left).Q
        left = torch.linalg.qr(rows @ right).Q
    values, vectors = torch.linalg.svd(left.T @ rows, full_matrices=False)[1:]
    return values, vectors


@dataclass(frozen=True)
class Intersection:
    """The directions that two row spaces Y1 and Y2 share.

    The two matrices are stacked. A singular value of the stack is the length of a combination of its rows by coefficients of norm
    1. If it is at most the threshold of `compute_threshold`, it counts as noise, and the spaces share one direction for it.
    y:       (shared directions, F), one vector each, whose entries have noise of standard deviation 1, as in `RowSpace`.
    largest: largest singular value that counts as noise, divided by the threshold; at most 1, and 0 if no singular value does.
    next:    smallest singular value above the threshold, divided by the threshold; above 1, and infinite if there is none.
    """

    y: Tensor
    largest: float
    next: float


def intersect(first: Tensor, second: Tensor) -> Intersection:
    """Return the intersection of two row spaces y (rank, F) in units of noise.

    Of each shared direction there are two noisy copies, one per space. Their mean, weighted by their inverse variances, is
    returned.
    """
    stack = torch.cat([first, second])
    r = torch.linalg.qr(stack.T).R
    left, values, _ = torch.linalg.svd(r.T)
    values = torch.cat([values, values.new_zeros(len(left) - len(values))])  # more rows than columns
    threshold = compute_threshold(stack.shape[1])
    shared = values <= threshold
    a, b = left[: len(first), shared].T, left[len(first) :, shared].T
    one, other = a.square().sum(dim=1, keepdim=True), b.square().sum(dim=1, keepdim=True)
    mean = other * (a @ first) - one * (b @ second)
    scale = (one * other).sqrt().clamp(min=torch.finfo(stack.dtype).tiny)
    above = values[~shared]
    largest = float(values[shared].max()) / threshold if bool(shared.any()) else 0.0
    return Intersection(mean / scale, largest, float(above.min()) / threshold if len(above) else float("inf"))


def orthonormalise(y: Tensor) -> Tensor:
    """Return an orthonormal basis of the span of the rows of y, which must be independent."""
    basis: Tensor = torch.linalg.qr(y.T).Q.T
    return basis


def compute_threshold(features: int) -> float:
    """Return the length up to which a vector of `features` entries with unit noise counts as noise: MARGIN * sqrt(features)."""
    return MARGIN * math.sqrt(features)


def count_all_shared(spaces: Sequence[RowSpace], rng: Generator) -> Tensor:
    """Return the dimensions (N, N) that row spaces share, in general the numbers of shared examples; ranks are on the diagonal.

    All pairs are screened in a common random projection. The shared dimensions of pairs that pass are counted without the
    projection.
    """
    ranks = torch.tensor([space.rank for space in spaces])
    shared = torch.diag(ranks)
    if not len(spaces) or not int(ranks.max()):
        return shared
    projected = _project([space.y for space in spaces], rng)
    threshold = SCREEN_MARGIN * compute_threshold(projected.shape[2])
    for pairs in torch.split(torch.combinations(torch.arange(len(spaces))), PAIRS_PER_CHUNK):
        stack = torch.cat([projected[pairs[:, 0]], projected[pairs[:, 1]]], dim=1)
        above = (torch.linalg.svdvals(stack) > threshold).sum(dim=1)
        for i, j in pairs[ranks[pairs].sum(dim=1) > above].tolist():
            shared[i, j] = shared[j, i] = len(intersect(spaces[i].y, spaces[j].y).y)
    return shared


def _project(spaces: Sequence[Tensor], rng: Generator) -> Tensor:
    """Return row spaces y (rank, F), padded with rows of zeros to the largest rank, after one random projection: (N, rank, d).

    The projection (F, d) has orthonormal columns, so that noise keeps its standard deviation. d is SKETCH_FACTOR times the
    largest rank, but at least 64 and at most F.
    """
    rank, features = max(len(y) for y in spaces), spaces[0].shape[1]
    dimensions = min(features, max(64, SKETCH_FACTOR * rank))
    columns = torch.eye(features, dtype=spaces[0].dtype, device=spaces[0].device)
    if dimensions < features:
        drawn = torch.randn(features, dimensions, generator=rng, dtype=spaces[0].dtype).to(spaces[0].device)
        columns = torch.linalg.qr(drawn).Q
    return nn.utils.rnn.pad_sequence([y @ columns for y in spaces], batch_first=True)
