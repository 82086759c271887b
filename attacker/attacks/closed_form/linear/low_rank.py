"""Low-rank factorisation of the gradient of a first linear layer: the number of examples behind it, and its noise.

For z = W x + b and a batch X (B, F), with D (B, width) the gradient of the mean loss with respect to z,

    [dL/dW, dL/db] = D^T [X, 1]

so its rows lie in the span of the B vectors [x, 1], and everything outside that span is noise or rounding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 2.0**-25
"""Relative standard deviation of a float32 value, with a margin for the sums that produced it."""

GAP = 8.0
"""Smallest ratio of the last singular value within the rank to the first one beyond it."""

LIKELY_GAP = 2.0
"""The same if the number of examples is known and the gap is at that number."""

BEYOND = 6.0
"""Distance from zero, in standard deviations of noise, from which a row or value counts as nonzero."""


class Factors(NamedTuple):
    """Rows (M, F) of rank R as coordinates (M, R) times an orthonormal basis (R, F).

    noise: (M,) standard deviation of each value of a row. live: (M,) which rows are more than noise.
    gap:   the last singular value kept over the first one left out.
    saturated: whether there are no more rows or values than the rank, so that it may be that of any number of examples.
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
    """The factors of rows (M, F), in float64; None where no singular value stands out as the last one, or all are zero.

    examples: how many there are at most, where that is known. The rank is lower where examples come twice or are lost to
    rounding. Rows are weighed by their own noise, which is read off what is left of them outside of the span.
    """
    rows = rows.double()
    length = rows.norm(dim=1)
    if not torch.isfinite(rows).all() or not length.any():
        return None
    weight = torch.where(length > 0, 1.0, 0.0).to(length)
    found: Factors | None = None
    for _ in range(2):
        values, vectors = torch.linalg.svd(rows * weight[:, None], full_matrices=False)[1:]
        rank, gap = _rank(values, examples)
        if not rank:
            return found
        basis = vectors[:rank]
        coordinates = rows @ basis.T
        noise = _noise(rows, coordinates, basis)
        live = (length > 0) & (coordinates.norm(dim=1) > BEYOND * noise * rank**0.5)
        saturated = rank >= min(int(live.sum()), int(rows.any(dim=0).sum()))
        found = Factors(coordinates, basis, noise, live, gap, saturated)
        weight = torch.where(length > 0, noise[length > 0].median() / noise, 0)
    return found


def _rank(values: Tensor, examples: int | None) -> tuple[int, float]:
    """The rank, 0 where there is none to see, and its gap; singular values descending."""
    smallest = values[0] * torch.finfo(values.dtype).eps * len(values)
    values = values.clamp(min=float(smallest))
    ratio = values[:-1] / values[1:]
    if not len(ratio):  # a single row or column
        return 1, float("inf")
    if examples is None:
        rank = int(ratio.argmax()) + 1
        return (rank if ratio[rank - 1] >= GAP else 0), float(ratio[rank - 1])
    if examples <= len(ratio) and ratio[examples - 1] >= LIKELY_GAP:
        return examples, float(ratio[examples - 1])
    wide = (ratio[:examples] >= GAP).nonzero()[:, 0]
    rank = int(wide[-1]) + 1 if len(wide) else 0
    return rank, float(ratio[rank - 1])


def _noise(rows: Tensor, coordinates: Tensor, basis: Tensor) -> Tensor:
    """(M,) of each row: what lies outside of the span, and no less than what storing its values in float32 leaves."""
    used = rows.any(dim=0)
    spare = int(used.sum()) - len(basis)
    left = rows - coordinates @ basis
    rounding = ROUNDING * rows.square().mean(dim=1).sqrt()
    if spare < 1:
        return rounding.clamp(min=torch.finfo(rows.dtype).tiny)
    measured = (left.square().sum(dim=1) / spare).sqrt()
    if spare < 16:  # too few values to tell a row's own
        measured = torch.maximum(measured, rounding)
    return torch.maximum(measured, rounding / 4).clamp(min=torch.finfo(rows.dtype).tiny)


def polish(rows: Tensor, noise: Tensor, active: Tensor, x: Tensor, *, rounds: int = 2) -> tuple[Tensor, Tensor, float]:
    """D (M, B) and x (B, F) of least squared error in units of the noise, for a given pattern of zeros of D; and its root mean.

    rows: (M, F), about D x. active: (M, B), where D may differ from zero. x: (B, F) to start from.
    The error is about 1 where the pattern is right, or has too few zeros.
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
