"""Gaussian priors of examples: a mean and a covariance in a few directions, with one variance for all others."""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_DIRECTIONS = 256
"""Largest number of principal directions of a fitted covariance."""


@dataclass(frozen=True)
class GaussianPrior:
    """A Gaussian distribution of one example with d values.

    mean: (d,). basis: (r, d), orthonormal rows. deviations: (r,), standard deviations along them. floor: standard deviation in
    all other directions.
    """

    mean: Tensor
    basis: Tensor
    deviations: Tensor
    floor: float

    def scale(self, vectors: Tensor) -> Tensor:
        """Return vectors (..., d), each multiplied by the symmetric square root of the covariance."""
        along = vectors @ self.basis.T
        return self.floor * vectors + (along * (self.deviations - self.floor)) @ self.basis

    @property
    def variance(self) -> float:
        """Return the prior's variance averaged over the d values: the expected mean squared error of guessing the mean."""
        values = self.mean.numel()
        return float((self.deviations.square().sum() + (values - len(self.deviations)) * self.floor**2) / values)


def fit_prior(x: Tensor) -> GaussianPrior:
    """Fit a Gaussian prior to examples (n, *shape) by probabilistic principal components.

    The prior has at most `MAX_DIRECTIONS` directions, and at most n // 2 if an example has n values or more.
    Source: Tipping and Bishop 1999. Raises ValueError for fewer than two examples.
    """
    flat = x.flatten(1).double()
    count, size = flat.shape
    if count < 2:
        raise ValueError(f"a prior is fitted to at least two examples, got {count}")
    mean = flat.mean(dim=0)
    _, values, basis = torch.linalg.svd(flat - mean, full_matrices=False)
    variances = values.square() / (count - 1)
    kept = min(MAX_DIRECTIONS, len(variances) if count > size else max(1, count // 2))
    floor = float((variances[kept:].sum() / max(1, size - kept)).sqrt())
    return GaussianPrior(mean, basis[:kept], variances[:kept].sqrt(), floor)
