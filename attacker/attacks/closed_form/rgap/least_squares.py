"""Generalised least squares (Aitken 1935): weights for equations with uncertain coefficients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SLOPE_VARIANCE = 1e6
"""Variance of an uncertain activation slope relative to the variance of an equation's residual."""
MAX_WHITENED_VALUES = 256
"""Largest number of values under a kernel for which the equations of a filter are whitened jointly."""


@dataclass(frozen=True)
class ConstraintWeights:
    """Weights for the gradient constraints k U^T = dL/dW of several layers, one equation per weight.

    factors: for each layer, a factor of each equation (N, C_out, values under the kernel), or whitening matrices (N, C_out,
             values, values), by which the equations of a filter are multiplied; None leaves the layer's equations unchanged.
    """

    factors: tuple[Tensor | None, ...]

    def apply(self, rows: Sequence[Tensor], *, transposed: bool = False) -> tuple[Tensor, ...]:
        return tuple(_multiply(f, r, transposed) for f, r in zip(self.factors, rows, strict=True))


def compute_whitening(columns: Tensor, variance: Tensor, lengths: Tensor) -> Tensor:
    """Return matrices that whiten the errors of each filter's equations k U^T = dL/dW if some values of k are uncertain.

    Whitening suppresses what depends on uncertain values of k. The errors of the scaled equations are assumed to have the
    covariance 1 + SLOPE_VARIANCE * diag(lengths) U diag(variance) U^T diag(lengths).
    columns:  input patches U, (N, V, places), with V values under the kernel.
    variance: variance of each value of k, (N, C_out, places); 0 for certain values.
    lengths:  factor by which each equation is multiplied to scale it, (N, C_out, V).
    Returns (N, C_out, V, V), or if V is above MAX_WHITENED_VALUES only one factor per equation, (N, C_out, V).
    """
    if columns.shape[1] > MAX_WHITENED_VALUES:
        return (1 + SLOPE_VARIANCE * lengths.square() * (variance @ columns.square().mT)).rsqrt()
    spread = (variance.sqrt()[:, :, None] * columns[:, None]) * lengths[..., None]
    covariance = SLOPE_VARIANCE * (spread @ spread.mT)
    covariance.diagonal(dim1=-2, dim2=-1).add_(1)
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device).expand_as(covariance)
    root = torch.linalg.cholesky_ex(covariance).L
    factor: Tensor = torch.linalg.solve_triangular(root, identity, upper=False)
    return factor


def _multiply(factor: Tensor | None, rows: Tensor, transposed: bool) -> Tensor:
    if factor is None:
        return rows
    if factor.ndim == rows.ndim:
        return factor * rows
    return ((factor.mT if transposed else factor) @ rows[..., None])[..., 0]
