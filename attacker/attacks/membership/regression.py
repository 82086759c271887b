"""Bayesian linear regression of an observed gradient on the gradients of candidates."""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal, StudentT

RIDGES = torch.logspace(-6, 1, 15, dtype=torch.float64)
"""Ridge parameters that are compared by marginal likelihood, as shares of the mean squared norm of the candidates' gradients."""
MIN_CANDIDATES = 50
"""Number of candidates below which no probabilities are estimated."""
MIN_CLASS = 20
"""Number of candidates of a class below which no probabilities are estimated."""
MIN_EVIDENCE = 25.0
"""Twice the gain in log-likelihood by a second component, from which on the scores count as a mixture. On the tuning part of
CIFAR-10 it was at most 22 in 30 pools without a training example."""
NORMAL_MAD = 0.6745
"""Median absolute deviation of a normal distribution with standard deviation 1."""
TAIL = 8.0
"""Degrees of freedom of Student's t distribution, whose tails replace those of the normal distribution of other candidates."""
MAX_STEPS = 500
"""Maximum number of steps of expectation maximisation."""


@dataclass(frozen=True)
class Coefficients:
    """Coefficients (P,) of P candidates in a regression, and the variances (P,) of their estimates if the true values are 0."""

    values: Tensor
    variances: Tensor


class Regression:
    """Regression on gradients G (P, M) of P candidates: g = G^T a + noise, with a normal prior of mean 0 for the coefficients a.

    Gradients that are all zero or not finite, as of a network that has diverged, give coefficients 0 of infinite variance. The
    eigenvalues of G G^T are computed once, for any number of observed gradients.
    """

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients
        self.finite = bool(gradients.isfinite().all())
        products = gradients @ gradients.T if self.finite else torch.eye(len(gradients))
        self.eigenvalues, self.vectors = torch.linalg.eigh(products.double())
        self.eigenvalues = self.eigenvalues.clamp(min=0)

    def fit(self, observed: Tensor) -> Coefficients:
        """Return the posterior means of the coefficients for one observed gradient (M,), with the ridge of the largest evidence.

        The noise is taken to be independent and of equal variance in all M values. Its variance is the mean squared residual.
        """
        if not (self.finite and observed.isfinite().all() and observed.any() and self.eigenvalues.max() > 0):
            zeros = torch.zeros_like(self.eigenvalues)
            return Coefficients(zeros, torch.full_like(zeros, torch.inf))
        along = self.vectors.T @ (self.gradients @ observed).double()
        power, count = observed.double().square().sum(), len(observed)
        ridge = self._choose_ridge(along, power, count)
        shrunk = 1 / (self.eigenvalues + ridge)
        values = self.vectors @ (along * shrunk)
        unexplained = power - 2 * (along.square() * shrunk).sum() + (along.square() * shrunk.square() * self.eigenvalues).sum()
        noise = unexplained.clamp(min=1e-30 * power) / count
        return Coefficients(values, noise * (self.vectors.square() @ (shrunk.square() * self.eigenvalues)))

    def _choose_ridge(self, along: Tensor, power: Tensor, count: int) -> Tensor:
        """Return the ridge parameter with the largest marginal likelihood of the observed gradient.

        along: the products of the eigenvectors with G times the gradient. power: its squared norm. count: its number of values.
        """
        ridges = RIDGES.to(self.eigenvalues) * self.eigenvalues.mean()
        inverse = 1 / (self.eigenvalues[:, None] + ridges)
        quadratic = (power - along.square() @ inverse).clamp(min=1e-30 * power)
        evidence = -0.5 * count * quadratic.log() - 0.5 * torch.log1p(self.eigenvalues[:, None] / ridges).sum(dim=0)
        best: Tensor = ridges[evidence.argmax()]
        return best


def combine(each: list[Coefficients]) -> Tensor:
    """Return z-scores (P,): the coefficients, assumed equal in all regressions, divided by their standard deviation.

    each: regressions of several rounds on the gradients of the same candidates. They are weighted by their precision.
    """
    precision = torch.stack([1 / one.variances.clamp(min=torch.finfo(torch.float64).tiny) for one in each])
    values = torch.stack([one.values for one in each])
    return (values * precision).sum(dim=0) / precision.sum(dim=0).sqrt().clamp(min=torch.finfo(torch.float64).tiny)


def estimate_probabilities(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the probability (P,) that a candidate is a training example, from z-scores (P,) and labels (P,) of all candidates.

    Scores of a class are first shifted so that their lower quartiles are equal: an update shows which classes the client has more
    of, which raises the scores of all candidates of these classes.

    The scores are taken to be a mixture of two normal distributions, of training examples and of other candidates. Their means,
    variances and shares are estimated by expectation maximisation. The tail of the second is then replaced by that of Student's t
    distribution: candidates that resemble training examples have larger scores than a normal distribution predicts.
    The result is NaN for fewer than `MIN_CANDIDATES` candidates or `MIN_CLASS` of a class, and if a single normal distribution
    explains the scores nearly as well (`MIN_EVIDENCE`), as without a training example among them.
    """
    undecided = torch.full_like(scores.double(), torch.nan)
    smallest = min(int((labels == label).sum()) for label in set(labels.tolist()))
    if len(scores) < MIN_CANDIDATES or smallest < MIN_CLASS or scores.std() == 0:
        return undecided
    z = _align_classes(scores.double(), labels)
    lower = z[z <= z.quantile(0.75)]
    others = Normal(lower.median(), (lower - lower.median()).abs().median().clamp(min=1e-12) / NORMAL_MAD)
    members, share, found = Normal(z.max(), others.scale), 1 / len(z), torch.zeros_like(z)
    for _ in range(MAX_STEPS):
        before, found = found, torch.sigmoid(_log_density(members, z) - _log_density(others, z) + log(share / (1 - share)))
        found = found.masked_fill(z < others.loc, 0.0)
        share = float(found.mean().clamp(1 / len(z), 1 - 1 / len(z)))
        others = _fit_normal(z, 1 - found, least_mean=z.min(), least_scale=1e-12 * others.scale)
        members = _fit_normal(z, found, least_mean=others.loc + others.scale, least_scale=others.scale)
        if (found - before).abs().max() < 1e-6:
            break
    both = torch.logaddexp(_log_density(members, z) + log(share), _log_density(others, z) + log(1 - share)).sum()
    if 2 * (both - _log_density(Normal(z.mean(), z.std()), z).sum()) < MIN_EVIDENCE:
        return undecided
    tail = StudentT(TAIL, others.loc, others.scale)
    return torch.sigmoid(_log_density(members, z) - _log_density(tail, z) + log(share / (1 - share))).masked_fill(
        z < others.loc, 0.0
    )


def _align_classes(z: Tensor, labels: Tensor) -> Tensor:
    """Return the values z (P,), shifted so that the lower quartile of each class is that of all values."""
    shifted, base = z.clone(), z.quantile(0.25)
    for label in set(labels.tolist()):
        shifted[labels == label] += base - z[labels == label].quantile(0.25)
    return shifted


def _log_density(distribution: Distribution, z: Tensor) -> Tensor:
    found: Tensor = distribution.log_prob(z)
    return found


def _fit_normal(z: Tensor, weights: Tensor, *, least_mean: Tensor, least_scale: Tensor) -> Normal:
    """Return the normal distribution of weighted values z (P,), with lower limits for its mean and standard deviation."""
    total = weights.sum().clamp(min=1e-9)
    mean = ((weights * z).sum() / total).maximum(least_mean)
    return Normal(mean, ((weights * (z - mean).square()).sum() / total).sqrt().maximum(least_scale))
