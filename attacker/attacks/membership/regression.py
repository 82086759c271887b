"""Bayesian linear regression of an observed gradient on the gradients of candidates."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGES = torch.logspace(-6, 1, 15, dtype=torch.float64)
"""Ridge parameters that are compared by marginal likelihood, as shares of the mean squared norm of the candidates' gradients."""
MIN_NOISE = 1e-6
"""Share of the observed power below which the unexplained rest is taken to be rounding errors."""
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Coefficients:
    """Coefficients (P,) of P candidates in a regression.

    values: the posterior means. shrinkage: the expected value of each coefficient if its true value is 1 and the true values of
    all others are 0, in [0, 1].
    variances: variances of `values` that the noise alone causes.
    """

    values: Tensor
    shrinkage: Tensor
    variances: Tensor

    def cpu(self) -> "Coefficients":
        return Coefficients(self.values.cpu(), self.shrinkage.cpu(), self.variances.cpu())


def join_blocks(blocks: Sequence[Tensor], fits: Sequence[Coefficients]) -> Coefficients:
    """Return the coefficients of all candidates from regressions of blocks. blocks: indices of candidates, by regression."""
    place = torch.cat(list(blocks)).argsort()
    values, shrinkage, variances = (
        torch.cat([getattr(fit, name) for fit in fits])[place] for name in ("values", "shrinkage", "variances")
    )
    return Coefficients(values, shrinkage, variances)


class Regression:
    """Regression on gradients G (P, M) of P candidates: g = G^T a + noise, with a normal prior of mean 0 for the coefficients a.

    If any entry of G or g is not finite, as for a network that has diverged, or if G or g is zero, then all P coefficients are 0
    with infinite variance. The eigenvalues of G G^T are computed once, for any number of observed gradients g.
    """

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients.double()
        self.finite = bool(self.gradients.isfinite().all())
        products = self.gradients @ self.gradients.T if self.finite else torch.eye(len(gradients), dtype=torch.float64)
        self.eigenvalues, self.vectors = torch.linalg.eigh(products)
        self.eigenvalues = self.eigenvalues.clamp(min=0)

    def fit(self, observed: Tensor) -> Coefficients:
        """Return the posterior means of the coefficients for one observed gradient (M,), with the ridge of the largest evidence.

        The noise is taken to be independent and of equal variance in all M values; their common variance is chosen by the largest
        evidence as well.
        """
        observed = observed.double()
        if not (self.finite and observed.isfinite().all() and observed.any() and self.eigenvalues.max() > 0):
            zeros = torch.zeros_like(self.eigenvalues)
            return Coefficients(zeros, zeros, torch.full_like(zeros, torch.inf))
        along = self.vectors.T @ (self.gradients @ observed)
        ridge, noise = self._choose_ridge(along, observed.square().sum(), len(observed))
        inverse = 1 / (self.eigenvalues + ridge)
        weights = self.vectors.square()
        return Coefficients(
            values=self.vectors @ (along * inverse),
            shrinkage=weights @ (inverse * self.eigenvalues),
            variances=noise * (weights @ (inverse.square() * self.eigenvalues)),
        )

    def _choose_ridge(self, along: Tensor, power: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the ridge parameter with the largest marginal likelihood of the observed gradient, and the noise's variance.

        The ridge is the variance of the noise divided by that of the coefficients (MacKay 1992, "Bayesian interpolation").
        along: the products of the eigenvectors with G times the gradient. power: the gradient's squared norm. count: its number M
        of values.
        """
        ridges = RIDGES.to(self.eigenvalues) * self.eigenvalues.mean()
        inverse = 1 / (self.eigenvalues[:, None] + ridges)
        rest = (power - along.square() @ inverse).clamp(min=MIN_NOISE * power)
        evidence = -0.5 * count * rest.log() - 0.5 * torch.log1p(self.eigenvalues[:, None] / ridges).sum(dim=0)
        best = evidence.argmax()
        return ridges[best], rest[best] / count


def combine(fits: Sequence[Coefficients]) -> Tensor:
    """Return z-scores (P,): the coefficients, assumed equal in all regressions, divided by their standard deviation.

    fits: regressions of several rounds on the gradients of the same candidates. Their unshrunk coefficients (value / shrinkage)
    are weighted by their precision, so that a round whose noise hides the candidates counts little.
    """
    weights = torch.stack([fit.shrinkage / fit.variances.clamp(min=TINY) for fit in fits])
    values, shrinkage = torch.stack([fit.values for fit in fits]), torch.stack([fit.shrinkage for fit in fits])
    return (values * weights).sum(dim=0) / (shrinkage * weights).sum(dim=0).sqrt().clamp(min=TINY)
