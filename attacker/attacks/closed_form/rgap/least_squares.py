"""Generalised least squares (Aitken 1935): weights of equations with uncertain coefficients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DOUBT = 1e6
"""Variance of an uncertain slope relative to that of an equation's residual."""
WHOLE = 256
"""Largest number of values under a kernel for which the equations of a filter are whitened jointly."""


@dataclass(frozen=True)
class Weighing:
    """What the equations of each layer are multiplied by: (N, C_out, taps), or (N, C_out, taps, taps) for mixtures of them.

    None leaves them as they are.
    """

    factors: tuple[Tensor | None, ...]

    def times(self, rows: Sequence[Tensor], *, transposed: bool = False) -> tuple[Tensor, ...]:
        return tuple(_times(f, r, transposed) for f, r in zip(self.factors, rows, strict=True))


def whitening(columns: Tensor, variance: Tensor, lengths: Tensor) -> Tensor:
    """A factor that whitens a filter's rows k U^T, each multiplied by its length, where the values of k are not certain.

    columns: U (N, taps, places). variance: of k, (N, C_out, places). lengths: (N, C_out, taps). The rows' errors then have the
    covariance 1 + DOUBT * lengths U diag(variance) U^T lengths: what depends on an uncertain value of k has no say.
    """
    if columns.shape[1] > WHOLE:
        return (1 + DOUBT * lengths.square() * (variance @ columns.square().mT)).rsqrt()
    spread = (variance.sqrt()[:, :, None] * columns[:, None]) * lengths[..., None]
    covariance = DOUBT * (spread @ spread.mT)
    covariance.diagonal(dim1=-2, dim2=-1).add_(1)
    one = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device).expand_as(covariance)
    root = torch.linalg.cholesky_ex(covariance).L
    factor: Tensor = torch.linalg.solve_triangular(root, one, upper=False)
    return factor


def _times(factor: Tensor | None, rows: Tensor, transposed: bool) -> Tensor:
    if factor is None:
        return rows
    if factor.ndim == rows.ndim:
        return factor * rows
    return ((factor.mT if transposed else factor) @ rows[..., None])[..., 0]
