"""The Bayesian Cramer-Rao bound on the mean squared error of reconstructions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from attacker.bounds.information import FisherInformation
from attacker.bounds.prior import GaussianPrior

MAX_DENSE = 1024
"""Largest number of unknown values for which the bound is computed by a dense factorisation."""
PROBES = 4
MAX_ITERATIONS = 50
TOLERANCE = 1e-3
"""Relative residual at which the conjugate gradients stop."""


@dataclass(frozen=True, kw_only=True)
class ErrorBound:
    """Lower bounds on the mean squared error of each example, (N,).

    error: standard error of each bound, which is estimated by random probes; 0 if it is exact.
    prior: mean squared error without any message.
    """

    mse: Tensor
    error: Tensor
    prior: float


def bound_error(
    information: FisherInformation, prior: GaussianPrior, *, max_dense: int = MAX_DENSE, probes: int = PROBES
) -> ErrorBound:
    """Return `trace((I + P^-1)^-1) / d` for each example, with the information I and the covariance P of the prior.

    No estimate has a smaller expected squared error, on average over examples with this distribution (van Trees 1968), as far
    as I is the information on average; here it is that at the given examples. A prior that knows more than mean and covariance,
    such as the range of values, may lead to smaller errors.

    With more than `max_dense` unknown values, the trace is estimated by random probes (Hutchinson 1990) and conjugate gradients.
    Conjugate gradients that stop early make the bound smaller, so that it remains a lower bound.
    """
    count = information.shape[0]
    if information.size <= max_dense:
        mse = _compute_dense(information, prior).reshape(count, -1).mean(dim=1)
        return ErrorBound(mse=mse, error=torch.zeros_like(mse), prior=prior.variance)
    rng = torch.Generator().manual_seed(0)
    found = torch.stack([_probe(information, prior, rng) for _ in range(probes)])
    return ErrorBound(mse=found.mean(dim=0), error=found.std(dim=0) / probes**0.5, prior=prior.variance)


def _scale(vectors: Tensor, prior: GaussianPrior) -> Tensor:
    """Apply the square root of the covariance to each example of flat vectors (..., N * d)."""
    return prior.scale(vectors.reshape(*vectors.shape[:-1], -1, prior.mean.numel())).flatten(-2)


def _compute_dense(information: FisherInformation, prior: GaussianPrior) -> Tensor:
    """Return the diagonal of (I + P^-1)^-1 as P^1/2 (1 + P^1/2 I P^1/2)^-1 P^1/2, which exists for every P."""
    root = _scale(torch.eye(information.size, dtype=prior.mean.dtype), prior)
    whitened = root @ information.to_dense() @ root
    factor = torch.linalg.cholesky(whitened + torch.eye(information.size, dtype=root.dtype))
    diagonal: Tensor = torch.linalg.solve_triangular(factor, root, upper=False).square().sum(dim=0)
    return diagonal


def _probe(information: FisherInformation, prior: GaussianPrior, rng: Generator) -> Tensor:
    """Return one estimate of the trace of each example's block, divided by its number of values, (N,)."""
    signs = torch.randint(0, 2, (information.size,), generator=rng).to(prior.mean.dtype) * 2 - 1
    start = _scale(signs, prior)
    solved = _solve(lambda v: v + _scale(information.multiply(_scale(v, prior)), prior), start)
    return (signs * _scale(solved, prior)).reshape(information.shape[0], -1).mean(dim=1)


def _solve(multiply: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
    """Return the solution of a positive definite system by conjugate gradients (Hestenes and Stiefel 1952)."""
    x, residual = torch.zeros_like(target), target.clone()
    direction, square = residual, residual.dot(residual)
    for _ in range(MAX_ITERATIONS):
        if square.sqrt() <= TOLERANCE * target.norm():
            break
        product = multiply(direction)
        step = square / direction.dot(product)
        x, residual = x + step * direction, residual - step * product
        previous, square = square, residual.dot(residual)
        direction = residual + square / previous * direction
    return x
