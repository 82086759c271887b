"""Exact directions of a batch from approximate ones, by the zeros that ReLU causes (see `sparse`).

An approximate example shows which neurons it surely turns off: those with the lowest pre-activations. Near the example's
direction, a direction is searched for that is zero at these neurons, and at as many others as possible. A direction with at least
SPARE_ZEROS more zeros than entries counts as exact. Exact directions make the other examples less approximate, so that the search
is repeated.

R is the rank of the gradient, which is the number of examples. M' is the number of its live rows, those that are more than noise;
each belongs to one neuron. A row is zero along a direction if their scalar product is 0.
"""

from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacker.attacks.closed_form.linear.low_rank import Factors, whiten
from attacker.attacks.closed_form.linear.sparse import Directions
from attacker.attacks.closed_form.linear.zeros import find_pattern, measure_agreement

OFF_SHARES = (0.5, 0.7, 0.85, 0.6, 0.4, 0.95)
"""Share of an example's off neurons, those with the lowest pre-activations, that its direction must be zero at in the first
iterations of a round. The values are used in turn, one per round."""
MAX_ROUNDS = 18
"""Largest number of rounds."""
ZERO_SCALES = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4)
"""Magnitudes beyond which values hardly count, by iteration, in units of the root mean square of the values of a direction."""
MAX_ZERO = 1e-3
"""Magnitude up to which a value counts as zero, in units of the root mean square of the values of a direction."""
SPARE_ZEROS = 8
"""A direction is kept if it has at least this many zeros more than entries (the rank); fewer zeros may be a coincidence."""
INVERSE_SHIFT, INVERSE_ITERATIONS = 1e-13, 4
"""Regularisation and number of steps of the inverse iteration."""
EQUAL_COSINE = 1 - 1e-8
"""Cosine from which two directions count as one."""
MIN_SCORE = 0.6
"""Smallest score, see `_replace_by_exact`, at which an exact direction replaces an approximate one."""
MIN_INDEPENDENT = 0.02
"""Smallest norm of the part of a unit direction outside the span of the others."""


class RefinedDirections(NamedTuple):
    """The directions of the R examples of a batch, of which some are exact.

    replaced: mask (R,) of the directions that an exact one has replaced; the others are approximate.
    """

    directions: Directions
    replaced: Tensor


def refine_directions(factors: Factors, p: Tensor, forward: Tensor, constant: Tensor) -> RefinedDirections | None:
    """Return the directions of the R examples of a batch (see `Directions`), exact where enough zeros of the gradient show it.

    p: approximate examples [x, 1] (R, R) up to a factor, in the coordinates of the basis, one per row.
    forward: (M, R), the layer's [W, b] in these coordinates. constant: (R,), the last column of the basis.
    Returns None if `p` is not of R linearly independent examples, or if fewer than R + SPARE_ZEROS rows are more than noise.
    """
    if p.shape != (factors.rank, factors.rank) or int(factors.live.sum()) < factors.rank + SPARE_ZEROS:
        return None
    rows, back = whiten(factors)
    start, info = torch.linalg.inv_ex(p)
    if int(info) or not bool(torch.isfinite(start).all()):
        return None
    start = torch.linalg.solve(back, start).T
    q = start = start / start.norm(dim=1, keepdim=True)
    pool, replaced = start[:0], torch.zeros(len(start), dtype=torch.bool, device=start.device)
    for number in range(MAX_ROUNDS):
        p, info = torch.linalg.inv_ex(back @ q.T)
        if int(info):
            return None
        z = (forward @ (p / (p @ constant)[:, None]).T)[factors.live]
        tried = torch.stack([_find_sparse(rows, q[i], z[:, i], OFF_SHARES[number % len(OFF_SHARES)]) for i in range(len(q))])
        pool = _keep_exact(torch.cat([pool, tried]), rows)
        previous, (q, replaced) = replaced, _replace_by_exact(pool, start, rows, z)
        if bool((replaced & previous).all()):
            break
    q = back @ q.T
    q = _sharpen(q / q.norm(dim=0), replaced, factors)
    return RefinedDirections(Directions(q, measure_agreement(q, find_pattern(q, factors), forward, constant), 0), replaced)


def _sharpen(q: Tensor, replaced: Tensor, factors: Factors) -> Tensor:
    """Return directions q (R, R), one per column, with the exact ones computed more precisely.

    Each exact one becomes the unit direction with the least sum of squares over the live rows that are zero along it, where every
    row is divided by the standard deviation of its noise. It stays as it is if there are fewer than R + SPARE_ZEROS such rows.
    replaced: mask (R,) of the exact directions, see `RefinedDirections`. factors: the rows, not whitened, in whose coordinates q
    is given.
    """
    columns = list(q.T)
    for i in replaced.nonzero()[:, 0].tolist():
        d = factors.coordinates @ q[:, i]
        zero = factors.live & (d.abs() <= MAX_ZERO * d.square().mean().sqrt())
        if int(zero.sum()) >= factors.rank + SPARE_ZEROS:
            columns[i] = torch.linalg.svd(factors.coordinates[zero] / factors.noise[zero, None], full_matrices=False)[2][-1]
    return torch.stack(columns, dim=1)


def _find_sparse(rows: Tensor, q: Tensor, z: Tensor, share: float) -> Tensor:
    """Return a unit direction (R,) near q (R,) along which many of the rows (M', R) are zero.

    z:     pre-activations (M',) of the approximate example at the rows.
    share: in the first iterations only this share of the rows with z < 0 counts, those with the lowest z, but at least
           R + SPARE_ZEROS rows; in the later ones all rows count, also those with z >= 0.
    """
    off = int((z < 0).sum())
    count = min(len(rows), max(int(share * off), rows.shape[1] + SPARE_ZEROS))
    weight = torch.zeros_like(z)
    weight[z.argsort()[:count]] = 1.0
    sure = weight
    shift = INVERSE_SHIFT * torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    for scale in ZERO_SCALES:
        factor = torch.linalg.cholesky_ex((rows * weight[:, None]).T @ rows / len(rows) + shift)[0]
        for _ in range(INVERSE_ITERATIONS):
            q = torch.cholesky_solve(q[:, None], factor)[:, 0]
            q = q / q.norm()
        weight = scale**2 / ((rows @ q).square() + scale**2)
        weight = weight if scale < ZERO_SCALES[1] else weight * sure
    return q.nan_to_num(nan=0.0)


def _keep_exact(q: Tensor, rows: Tensor) -> Tensor:
    """Return the distinct unit directions, up to sign, of q (K, R) along which R + SPARE_ZEROS of the rows (M', R) are zero."""
    zeros = ((q @ rows.T).abs() <= MAX_ZERO).sum(dim=1) * (q.norm(dim=1) > 0.5)
    q = q[zeros >= rows.shape[1] + SPARE_ZEROS]
    return q[~torch.tril((q @ q.T).abs() > EQUAL_COSINE, diagonal=-1).any(dim=1)]


def _replace_by_exact(pool: Tensor, start: Tensor, rows: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return R independent directions (R, R), one per row, and a mask (R,) of those from the `pool` of exact directions.

    pool: (K, R), one per row. start: approximate directions (R, R), one per row; those that no exact one replaces remain.
    z: pre-activations (M', R) of the approximate examples at the rows (M', R).

    A pair is an exact direction and the approximate direction that it may replace. Its score is a product of two factors. The
    first is the share of rows that are zero along the exact direction and off for the approximate example, or neither. For the
    second, the exact direction is written as a combination of all approximate ones: it is the magnitude of the coefficient of the
    pair's approximate direction, divided by the largest magnitude in this combination. Pairs are chosen so that the sum of scores
    is largest, with each direction in at most one pair. The exact direction of a pair replaces the approximate one if the score
    is at least MIN_SCORE and the directions stay independent.
    """
    zero, off = ((pool @ rows.T).abs() <= MAX_ZERO).to(z.dtype), (z <= 0).to(z.dtype)
    agreement = (zero @ off + (1 - zero) @ (1 - off)) / len(rows)
    parts = torch.linalg.solve(start.T, pool.T).abs().T
    score = agreement * parts / parts.amax(dim=1, keepdim=True).clamp(min=1e-300)
    directions, places = (torch.as_tensor(indices) for indices in linear_sum_assignment(-score.cpu().numpy()))
    q, replaced = start.clone(), torch.zeros(len(start), dtype=torch.bool, device=start.device)
    for i in score[directions, places].argsort(descending=True).tolist():
        k, place = int(directions[i]), int(places[i])
        others = torch.cat([q[:place], q[place + 1 :]])
        basis = torch.linalg.qr(others.T)[0]
        if score[k, place] >= MIN_SCORE and float((pool[k] - basis @ (basis.T @ pool[k])).norm()) >= MIN_INDEPENDENT:
            q[place], replaced[place] = pool[k], True
    return q, replaced
