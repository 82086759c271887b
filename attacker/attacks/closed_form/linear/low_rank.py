"""Low-rank factorisation of the gradient of a first linear layer, with estimates of the gradient's rank and noise.

For z = W x + b and a batch X (B, F), with D (B, width) the gradient of the mean loss with respect to z,

    [dL/dW, dL/db] = D^T [X, 1]

so that its rows lie in the span of the B vectors [x, 1], and everything outside that span is noise or rounding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SUM_ROUNDING = 2.0**-25
"""Relative standard deviation of a float32 value, with a margin for the sums that produced it."""

MIN_GAP = 8.0
"""Smallest ratio of the last singular value within the rank to the first one beyond it."""

MIN_EXPECTED_GAP = 2.0
"""Smallest ratio of these singular values, instead of MIN_GAP, if the number of examples is known and equals the rank."""

NOISE_LEVEL = 6.0
"""Magnitude, in standard deviations of noise, from which a row or value counts as nonzero."""


class Factors(NamedTuple):
    """A factorisation of rows (M, F) of rank R into coordinates (M, R) times an orthonormal basis (R, F).

    noise: (M,) estimated standard deviation of the noise of each value of a row. live: (M,) mask of the rows that are more than
           noise.
    gap:   the last singular value kept divided by the first one left out.
    saturated: whether the rank equals the number of live rows or of columns that are not zero. The number of examples may then
           be larger.
    """

    coordinates: Tensor
    basis: Tensor
    noise: Tensor
    live: Tensor
    gap: float
    saturated: bool

    @property
    def rank(self) -> int:
        return len(self.basis)


def factorise(rows: Tensor, examples: int | None = None) -> Factors | None:
    """Factorise rows (M, F) of a gradient in float64 into as few directions as explain them up to noise.

    Returns None if all rows are zero, if a value is not finite, or if no gap in the singular values shows the rank.
    examples: number of examples, if known; the rank is at most this number. The rank is lower if some examples are equal, or
              change the gradient by less than its rounding errors.
    The factorisation is done twice. In the second pass, rows are weighted by the inverse of their noise, which is
    estimated from their part outside the span of the first basis.
    """
    rows = rows.double()
    length = rows.norm(dim=1)
    if not torch.isfinite(rows).all() or not length.any():
        return None
    weight = torch.where(length > 0, 1.0, 0.0).to(length)
    factors: Factors | None = None
    for _ in range(2):
        values, vectors = torch.linalg.svd(rows * weight[:, None], full_matrices=False)[1:]
        rank, gap = _estimate_rank(values, examples)
        if not rank:
            return factors
        basis = vectors[:rank]
        coordinates = rows @ basis.T
        noise = _estimate_noise(rows, coordinates, basis)
        live = (length > 0) & (coordinates.norm(dim=1) > NOISE_LEVEL * noise * rank**0.5)
        saturated = rank >= min(int(live.sum()), int(rows.any(dim=0).sum()))
        factors = Factors(coordinates, basis, noise, live, gap, saturated)
        weight = torch.where(length > 0, noise[length > 0].median() / noise, 0)
    return factors


def _estimate_rank(values: Tensor, examples: int | None) -> tuple[int, float]:
    """Return the numerical rank, or 0 if no gap shows it, and the gap: the last singular value kept divided by the next one.

    If the number of examples is unknown, the rank is at the largest gap, which must be at least MIN_GAP. If it is known, the rank
    is this number if the gap there is at least MIN_EXPECTED_GAP, otherwise the largest lower rank with a gap of at least MIN_GAP.
    values: singular values, descending. examples: number of examples, which the rank does not exceed; None if unknown.
    """
    smallest = values[0] * torch.finfo(values.dtype).eps * len(values)
    values = values.clamp(min=float(smallest))
    ratio = values[:-1] / values[1:]
    if not len(ratio):  # a single row or column
        return 1, float("inf")
    if examples is None:
        rank = int(ratio.argmax()) + 1
        return (rank if ratio[rank - 1] >= MIN_GAP else 0), float(ratio[rank - 1])
    if examples <= len(ratio) and ratio[examples - 1] >= MIN_EXPECTED_GAP:
        return examples, float(ratio[examples - 1])
    wide = (ratio[:examples] >= MIN_GAP).nonzero()[:, 0]
    rank = int(wide[-1]) + 1 if len(wide) else 0
    return rank, float(ratio[rank - 1])


def _estimate_noise(rows: Tensor, coordinates: Tensor, basis: Tensor) -> Tensor:
    """Return the estimated standard deviation (M,) of the noise of each row's values.

    It is the root mean square, per dimension, of the part of the row outside the span of `basis`. Dimensions are counted among
    the columns of `rows` that are not zero. The estimate is at least a quarter of the float32 rounding, which is `SUM_ROUNDING`
    times the root mean square of the row. With fewer than 16 dimensions outside the span, it is at least the whole rounding;
    with none, it is the rounding.
    coordinates: (M, R), coordinates of the rows in the basis (R, F).
    """
    used = rows.any(dim=0)
    spare = int(used.sum()) - len(basis)
    left = rows - coordinates @ basis
    rounding = SUM_ROUNDING * rows.square().mean(dim=1).sqrt()
    if spare < 1:
        return rounding.clamp(min=torch.finfo(rows.dtype).tiny)
    measured = (left.square().sum(dim=1) / spare).sqrt()
    if spare < 16:  # too few values to estimate the noise of a single row
        measured = torch.maximum(measured, rounding)
    return torch.maximum(measured, rounding / 4).clamp(min=torch.finfo(rows.dtype).tiny)


def whiten(factors: Factors) -> tuple[Tensor, Tensor]:
    """Return the live rows (M', R), whitened so that their mean square is 1 along each direction, and the matrix back (R, R).

    The matrix maps directions from whitened coordinates to those of the factors. It is not finite if the rows have rank below R.
    """
    left, value, right = torch.linalg.svd(factors.coordinates[factors.live], full_matrices=False)
    scale = len(left) ** 0.5
    return left * scale, right.T / value * scale


def polish(rows: Tensor, noise: Tensor, active: Tensor, x: Tensor, *, rounds: int = 2) -> tuple[Tensor, Tensor, float]:
    """Fit rows (M, F) by D x for a given zero pattern of D, and return D (M, B), x (B, F) and the root mean squared residual.

    The fit is by alternating least squares, with residuals in units of `noise` (M,), the standard deviation of each row's noise.
    active: (M, B), where D may differ from zero. x: starting point. rounds: number of alternations.
    The residual is about 1 if the zero pattern is right, larger if it has wrong zeros, and infinite if the fit breaks down.
    """
    chosen = active.to(x.dtype)
    weight = 1 / noise[:, None]
    d = torch.zeros_like(chosen)
    for _ in range(rounds):
        length = x.norm(dim=1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        unit = x / length
        gram = (unit @ unit.T) * chosen[:, :, None] * chosen[:, None, :] + torch.diag_embed(1 - chosen)
        d = torch.linalg.solve_ex(gram, (rows @ unit.T) * chosen)[0] * chosen / length.T
        if not bool(torch.isfinite(d).all()):
            return d, x, float("inf")
        x = torch.linalg.lstsq(weight * d, weight * rows).solution
    return d, x, float((weight * (rows - d @ x)).square().mean().sqrt())
