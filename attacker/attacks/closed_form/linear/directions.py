"""A pool of candidate directions for the search of `sparse`, refined to the precision of the data, and sorted by their zeros.

A direction q (R,) is a linear combination of the R coordinates of the factorised gradient. Along the direction of a true example,
the gradient is zero at all neurons that are off for the example.
"""

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.low_rank import Factors
from attacker.attacks.closed_form.linear.sampling import InformativeRows
from attacker.attacks.closed_form.linear.zeros import (
    MAX_ZERO_COMPONENT,
    compute_balanced_accuracy,
    find_pattern,
    measure_separability,
    normalise_rows,
)

MAX_TOLERANCE = 0.05
"""Largest tolerance for zeros under noise; beyond it, every direction has zeros."""

KNOWN_TOLERANCE = 1e-5
"""Largest 1 - cosine at which a sampled direction counts as already in the pool."""

POOL_SIZE = 400
"""Number of directions that are kept."""

SHARPENING_ROUNDS = 5
"""Number of iterations that refine a direction."""

MAX_SCREENED = 256
"""Number of directions of each batch of samples that are examined closely."""

EQUAL_TOLERANCE = 1e-6
"""Largest 1 - cosine of two directions that count as equal."""

MAX_UNMIXED = 8
"""Number of directions that unmixing one direction returns."""

MIN_SEPARABLE = 0.985
"""Smallest `DirectionPool.score` at which a direction counts as the direction of a single example."""

WRONG_SIDE_PENALTIES = (5.0, 1.0, 20.0)
"""Number of zeros that one neuron on the wrong side outweighs; the directions are sorted once for each value."""

MIN_INDEPENDENT = 1e-4
"""Smallest norm of the part of a unit direction outside the span of the others."""


class DirectionPool:
    """Distinct directions along which many rows of the gradient are 0.

    The directions are sorted by the number of these rows minus WRONG_SIDE_PENALTIES[0] times the number of neurons that are
    estimated to lie on the wrong side of the separating plane, see `score`; the direction with the largest difference is first.
    Each row belongs to one neuron. A row is 0 along a direction if the scalar product of the two is 0, as for a neuron that the
    example of the direction turns off.
    q: unit directions (K, R) in whitened coordinates. off: mask (K, M') of the M' rows of `space` that are 0 along each
    direction.
    score: `zeros.measure_separability` of each direction, (K,): at most 1; near 1 for the direction of a single example.
    """

    def __init__(self, space: InformativeRows, factors: Factors, forward: Tensor) -> None:
        self.space, self.factors, self.forward = space, factors, forward
        self.q = space.rows.new_zeros(0, space.rank)
        self.off = torch.zeros(0, len(space.rows), dtype=torch.bool, device=space.rows.device)
        self.score = space.rows.new_zeros(0)

    def add(self, q: Tensor) -> None:
        off = self.find_off_neurons(q, MAX_ZERO_COMPONENT)
        count = off.sum(dim=1)
        order = count.argsort(descending=True, stable=True)
        order = order[count[order] >= self.space.rank + 2]
        q, off = q[order], off[order]
        fresh = _find_first_of_alike(off) & ((q @ self.q.T).abs() < 1 - KNOWN_TOLERANCE).all(dim=1)
        q, off = q[fresh], off[fresh]
        if len(q):
            likeness = self._screen(off)
            likeness[: MAX_SCREENED // 2] += 1  # always keep those with most zeros
            promising = likeness.topk(min(MAX_SCREENED, len(off))).indices.sort().values
            self._take(self.sharpen(q[promising]))

    def _screen(self, off: Tensor) -> Tensor:
        """Return how well a plane separates the neurons that are on along each of K directions from the others, (K,), at most 1.

        It is the balanced accuracy of a plane for each direction, by linear regression on the neurons' weights, which is a cheap
        approximation of `zeros.measure_separability`. off: mask (K, M') of the neurons that are zero along each direction, see
        `find_off_neurons`.
        """
        on = torch.zeros(len(self.space.live), len(off), dtype=torch.bool, device=off.device)
        on[self.space.live] = ~off.T
        x = normalise_rows(self.forward)
        plane = torch.linalg.lstsq(x, 2.0 * on.to(x.dtype) - 1).solution
        return compute_balanced_accuracy(x @ plane > 0, on, ~on)

    def _take(self, q: Tensor) -> None:
        score = measure_separability(find_pattern(self.convert_to_original(q), self.factors), self.forward)
        off = self.find_off_neurons(q, 1e-9)
        q, off, score = torch.cat([self.q, q]), torch.cat([self.off, off]), torch.cat([self.score, score])
        order = self._rank(off, score, WRONG_SIDE_PENALTIES[0])
        same = (q[order] @ q[order].T).abs() > 1 - EQUAL_TOLERANCE  # up to sign; the first of equal directions is kept
        order = order[~torch.tril(same, diagonal=-1).any(dim=1)][:POOL_SIZE]
        self.q, self.off, self.score = q[order], off[order], score[order]

    def unmix(self, directions: Tensor, doubtful: Tensor) -> None:
        """Add, for each doubtful direction, candidates that differ from it by a multiple of another direction of `directions`.

        Two mixed directions are separated by the multiple that creates most zeros. For each other direction, each row proposes
        the multiple that makes it zero; the distinct candidates with most zeros are added, at most MAX_UNMIXED for each doubtful
        direction. Of the pool, the POOL_SIZE best directions are kept.
        directions: directions in the coordinates of the factors, one per column, (R, R). doubtful: (R,) mask.
        """
        q = torch.linalg.solve(self.space.back, directions).T
        q = q / q.norm(dim=1, keepdim=True)
        along = q @ self.space.rows.T
        for i in doubtful.nonzero()[:, 0].tolist():
            others = [k for k in range(len(q)) if k != i]
            share = along[i] / torch.where(along[others] == 0, 1, along[others])
            trial = q[i] - share[..., None] * q[others, None]
            trial = trial.flatten(0, 1) / trial.flatten(0, 1).norm(dim=1, keepdim=True).clamp(min=1e-300)
            trial = trial[trial.isfinite().all(dim=1)]
            off = self.find_off_neurons(trial, MAX_ZERO_COMPONENT)
            largest = off.sum(dim=1).topk(min(4 * MAX_UNMIXED, len(off))).indices
            trial, off = trial[largest], off[largest]
            self._take(self.sharpen(trial[_find_first_of_alike(off)][:MAX_UNMIXED]))

    def convert_to_original(self, q: Tensor) -> Tensor:
        """Return unit vectors (R, K), one per column, in the coordinates of the factors. q: whitened directions (K, R)."""
        back = self.space.back @ q.T
        result: Tensor = back / back.norm(dim=0)
        return result

    def find_off_neurons(self, q: Tensor, minimum: float) -> Tensor:
        """Return a mask (K, M') of the rows whose component along unit directions q (K, R) is zero.

        The tolerance is that for noise (`InformativeRows.compute_tolerance`), but at least `minimum` and at most MAX_TOLERANCE.
        """
        return (q @ self.space.rows.T).abs() <= self.space.compute_tolerance(q).clamp(min=minimum).clamp(max=MAX_TOLERANCE)

    def sharpen(self, q: Tensor) -> Tensor:
        """Return the directions (K, R) refined to the precision of the data.

        Each becomes the direction with the smallest weighted sum of squares over its zero rows (iteratively reweighted), if it
        has at least R zero rows.
        """
        rows, rank = self.space.rows, self.space.rank
        for _ in range(SHARPENING_ROUNDS):
            noise = self.space.compute_noise(q)
            size = (q @ rows.T).abs()
            off = size <= self.space.compute_tolerance(q).clamp(min=MAX_ZERO_COMPONENT).clamp(max=MAX_TOLERANCE)
            middle = (rank - 1 + (off.sum(dim=1) - rank + 1).clamp(min=1) // 2).clamp(max=len(rows) - 1)  # unsampled zeros
            scale = size.sort(dim=1).values.gather(1, middle[:, None])
            minimum = torch.maximum(scale, noise).clamp(min=torch.finfo(q.dtype).eps)
            weight = off / (size.square() + minimum.square())
            weight = weight / weight.amax(dim=1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
            scatter = (rows.T * weight[:, None]) @ rows
            sharpened = torch.linalg.eigh(scatter)[1][:, :, 0]
            q = torch.where((off.sum(dim=1) >= rank)[:, None], sharpened, q)
        return q

    def find_on_neurons(self) -> Tensor:
        """Return a mask (M, K') of neurons that are on along the K' of the first R directions that MIN_SEPARABLE admits."""
        sure = self.score[: self.space.rank] >= MIN_SEPARABLE
        return find_pattern(self.convert_to_original(self.q[: self.space.rank][sure]), self.factors).on

    def choose(self, penalty: float) -> list[int] | None:
        """Return the indices of the R best linearly independent directions; None if there are fewer.

        The best have the most zeros, less `penalty` times the estimated number of neurons on the wrong side of the plane that
        best separates the neurons that are on from the others, see `zeros.measure_separability`.
        """
        chosen: list[int] = []
        left = torch.eye(self.space.rank, dtype=self.q.dtype, device=self.q.device)
        for i in self._rank(self.off, self.score, penalty).tolist():
            new = left @ self.q[i]
            if float(new.norm()) > MIN_INDEPENDENT:
                left = left - torch.outer(new, new) / new.square().sum()
                chosen.append(i)
            if len(chosen) == self.space.rank:
                return chosen
        return None

    def _rank(self, off: Tensor, score: Tensor, penalty: float) -> Tensor:
        wrong = (1 - score) * len(self.space.live)
        return (off.sum(dim=1) - penalty * wrong).argsort(descending=True, stable=True)


def _find_first_of_alike(off: Tensor) -> Tensor:
    """Return a mask (K,) that keeps the first of all directions with nearly the same zeros."""
    z = off.to(torch.float32)
    common, size = z @ z.T, z.sum(dim=1)
    alike = common > 0.95 * (size[:, None] + size[None] - common).clamp(min=1)
    return ~torch.tril(alike, diagonal=-1).any(dim=1)
