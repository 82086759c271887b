"""Probabilities that candidates are training examples, from a mixture model of their z-scores."""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal, StudentT

MIN_CANDIDATES = 50
"""Number of candidates below which no probabilities are estimated."""
MIN_CLASS = 20
"""Number of candidates in the smallest class below which no probabilities are estimated."""
MIN_EVIDENCE = 25.0
"""Twice the gain in log-likelihood by a second component, from which on scores of at most 1,000 candidates count as a mixture.
This gain was at most 20 for 100 pools of images of the tuning part of CIFAR-10 without a training example. The error of the model
grows with the number of candidates, so that more of them need more evidence, in proportion."""
NORMAL_MAD = 0.6745
"""Median absolute deviation of a normal distribution with standard deviation 1."""
DEGREES_OF_FREEDOM = 8.0
"""Degrees of freedom of Student's t distribution of the scores of other candidates. Some resemble training examples, and have
larger scores than a normal distribution predicts."""
MIN_OUTLYING_SCALES = 4.0
"""Before the first step, scores that are at least this many scales above the location of the other scores are taken for scores of
training examples."""
MAX_STEPS = 500
"""Maximum number of steps of expectation maximisation."""


@dataclass(frozen=True)
class Mixture:
    """A mixture of the z-scores of training examples (`members`) and of other candidates.

    share: share of the training examples. evidence: twice the gain in log-likelihood over a single distribution for all scores,
    normal or Student's t, whichever is more likely.
    """

    members: Normal
    others: StudentT
    share: float
    evidence: float

    def compute_probabilities(self, z: Tensor) -> Tensor:
        """Return the probability of being a training example by z-score (P,), which never falls, and is 0 below `others.loc`."""
        ratio = _log_density(self.members, z.minimum(self.members.loc)) - _log_density(self.others, z)
        probabilities = torch.sigmoid(ratio + log(self.share / (1 - self.share)))
        return probabilities.masked_fill(z < self.others.loc, 0.0)


def estimate_membership(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the probability (P,) that a candidate is a training example, from z-scores (P,) and labels (P,) of all candidates.

    Scores of a class are first shifted so that their lower quartiles are equal: an update shows which classes the client has more
    of, which raises the scores of all candidates of these classes.

    All P results are NaN if there are fewer than `MIN_CANDIDATES` candidates, if any class has fewer than `MIN_CLASS` of them, if
    all scores are equal, or if one distribution explains the scores nearly as well as two (`MIN_EVIDENCE`), as when no candidate
    is a training example.
    """
    undecided = torch.full_like(scores.double(), torch.nan)
    smallest = min(int((labels == label).sum()) for label in set(labels.tolist()))
    if len(scores) < MIN_CANDIDATES or smallest < MIN_CLASS or scores.std() == 0:
        return undecided
    z = _align_classes(scores.double(), labels)
    mixture = _fit_mixture(z)
    return mixture.compute_probabilities(z) if mixture.evidence >= MIN_EVIDENCE * max(1.0, len(z) / 1000) else undecided


def _fit_mixture(z: Tensor) -> Mixture:
    """Return the mixture with the largest likelihood of z-scores z (P,), found by expectation maximisation.

    The two distributions are limited by `members.mean >= others.loc + others.scale` and `members.stddev >= others.scale`.
    """
    lower = z[z <= z.quantile(0.75)]
    others = StudentT(DEGREES_OF_FREEDOM, lower.median(), (lower - lower.median()).abs().median().clamp(min=1e-12) / NORMAL_MAD)
    alone = others
    high = (z >= (others.loc + MIN_OUTLYING_SCALES * others.scale).minimum(z.max())).to(z.dtype)
    members = _fit_normal(z, high, least_mean=others.loc + others.scale, least_scale=others.scale)
    share, membership = float(high.mean()), torch.zeros_like(z)
    for _ in range(MAX_STEPS):
        before, membership = membership, Mixture(members, others, share, 0.0).compute_probabilities(z)
        share = float(membership.mean().clamp(1 / len(z), 1 - 1 / len(z)))
        others, alone = _refit_student(others, z, 1 - membership), _refit_student(alone, z, torch.ones_like(z))
        members = _fit_normal(z, membership, least_mean=others.loc + others.scale, least_scale=others.scale)
        if (membership - before).abs().max() < 1e-6:
            break
    both = torch.logaddexp(_log_density(members, z) + log(share), _log_density(others, z) + log(1 - share)).sum()
    best_single = max(float(_log_density(single, z).sum()) for single in (alone, Normal(z.mean(), z.std())))
    return Mixture(members, others, share, 2 * (float(both) - best_single))


def _align_classes(z: Tensor, labels: Tensor) -> Tensor:
    """Return the z-scores z (P,), shifted by one number per class so that each class has the lower quartile of all P scores."""
    shifted, base = z.clone(), z.quantile(0.25)
    for label in set(labels.tolist()):
        shifted[labels == label] += base - z[labels == label].quantile(0.25)
    return shifted


def _log_density(distribution: Distribution, z: Tensor) -> Tensor:
    result: Tensor = distribution.log_prob(z)
    return result


def _refit_student(last: StudentT, z: Tensor, weights: Tensor) -> StudentT:
    """Return Student's t distribution after one step of expectation maximisation from `last` on weighted z-scores z (P,)."""
    near = weights * (DEGREES_OF_FREEDOM + 1) / (DEGREES_OF_FREEDOM + ((z - last.loc) / last.scale).square())
    loc = (near * z).sum() / near.sum().clamp(min=1e-9)
    scale = ((near * (z - loc).square()).sum() / weights.sum().clamp(min=1e-9)).sqrt()
    return StudentT(DEGREES_OF_FREEDOM, loc, scale.maximum(1e-12 * last.scale))


def _fit_normal(z: Tensor, weights: Tensor, *, least_mean: Tensor, least_scale: Tensor) -> Normal:
    """Return the normal distribution fitted to weighted z-scores z (P,), with lower limits for mean and standard deviation."""
    total = weights.sum().clamp(min=1e-9)
    mean = ((weights * z).sum() / total).maximum(least_mean)
    return Normal(mean, ((weights * (z - mean).square()).sum() / total).sqrt().maximum(least_scale))
