"""The Bayesian Cramer-Rao bound on the mean squared error of reconstructions, approximated at the given examples."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from attacker.attacks.optimisers.conjugate_gradients import conjugate_gradients
from attacker.bounds.information import FisherInformation
from attacker.bounds.prior import GaussianPrior

MAX_DENSE = 1024
"""Largest number of unknown values for which the bound is computed by a dense factorisation."""
NUM_PROBES = 4
"""Default number of random probes by which the trace is estimated."""
MAX_ITERATIONS = 50
"""Largest number of iterations of conjugate gradients."""
TOLERANCE = 1e-3
"""Relative residual at which the conjugate gradients stop."""


@dataclass(frozen=True, kw_only=True)
class ErrorBound:
    """Lower bounds on the mean squared error of reconstructions.

    mse:   bound for each example, on the mean over its values, (N,).
    error: standard error of each bound, (N,), if the bounds are estimated by random probes; 0 if they are computed.
    prior: mean squared error of the prior's mean as an answer, without any message; the same for all examples.
    """

    mse: Tensor
    error: Tensor
    prior: float


def bound_error(
    information: FisherInformation, prior: GaussianPrior, *, max_dense: int = MAX_DENSE, probes: int = NUM_PROBES
) -> ErrorBound:
    """Return the Bayesian Cramer-Rao bound: the trace of each example's diagonal block of (F + P^-1)^-1, divided by d.

    F is the Fisher information, P the covariance of the prior, and d the number of values of an example. If F is averaged over
    examples with the prior's distribution, no estimate has a smaller expected squared error (van Trees 1968). Here F is taken at
    the given examples only, so that the bound is an approximation. An attacker who knows more than mean and covariance, such as
    the range of values, may have smaller errors.

    With more than `max_dense` unknown values, the trace is estimated by `probes` random probes (Hutchinson 1990) and conjugate
    gradients. Conjugate gradients that stop early make the mean of the bounds smaller, not larger.
    Raises ValueError if `probes` is less than 2, since the spread of the probes gives the standard error; also if no probes are
    used.
    """
    if probes < 2:
        raise ValueError(f"probes must be at least 2, since their spread gives the standard error; got {probes}")
    count = information.shape[0]
    if information.size <= max_dense:
        mse = _compute_dense(information, prior).reshape(count, -1).mean(dim=1)
        return ErrorBound(mse=mse, error=torch.zeros_like(mse), prior=prior.variance)
    rng = torch.Generator().manual_seed(0)
    estimates = torch.stack([_probe(information, prior, rng) for _ in range(probes)])
    return ErrorBound(mse=estimates.mean(dim=0), error=estimates.std(dim=0) / probes**0.5, prior=prior.variance)


def _scale(vectors: Tensor, prior: GaussianPrior) -> Tensor:
    """Return flat vectors (..., N * d) with each example multiplied by the square root of the prior's covariance."""
    return prior.scale(vectors.reshape(*vectors.shape[:-1], -1, prior.mean.numel())).flatten(-2)


def _compute_dense(information: FisherInformation, prior: GaussianPrior) -> Tensor:
    """Return the diagonal of (F + P^-1)^-1, (N * d,), computed as P^1/2 (1 + P^1/2 F P^1/2)^-1 P^1/2, also for a singular P."""
    root = _scale(torch.eye(information.size, dtype=prior.mean.dtype), prior)
    whitened = root @ information.to_dense() @ root
    factor = torch.linalg.cholesky(whitened + torch.eye(information.size, dtype=root.dtype))
    diagonal: Tensor = torch.linalg.solve_triangular(factor, root, upper=False).square().sum(dim=0)
    return diagonal


def _probe(information: FisherInformation, prior: GaussianPrior, rng: Generator) -> Tensor:
    """Return Hutchinson's estimate, by one random vector, of each example's trace in `bound_error`, divided by d, (N,)."""
    signs = torch.randint(0, 2, (information.size,), generator=rng).to(prior.mean.dtype) * 2 - 1
    start = _scale(signs, prior)
    solved, _ = conjugate_gradients(
        lambda v: v + _scale(information.multiply(_scale(v[0], prior)), prior),
        start[None],
        iterations=MAX_ITERATIONS,
        tolerance=TOLERANCE,
    )
    return (signs * _scale(solved, prior)).reshape(information.shape[0], -1).mean(dim=1)
