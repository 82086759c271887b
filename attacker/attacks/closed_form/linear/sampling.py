"""Random sampling of directions that are orthogonal to many rows, preferring rows that are probably off for the same example.

The rows belong to a gradient of rank R. M' is the number of informative rows, those that are more than noise.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from attacker.attacks.closed_form.linear.low_rank import Factors
from attacker.attacks.closed_form.linear.zeros import MAX_ZERO_COMPONENT, compute_zero_threshold, fit_logistic, normalise_rows

SAMPLES_PER_BATCH = 2048
"""Number of samples drawn at once."""

SHARPNESS_RANGE = (1.0, 8.0)
"""Range of how strongly samples follow the estimated probabilities, from nearly uniform to nearly deterministic."""

EXAMPLE_SPREAD = 0.5
"""Assumed spread of the examples, relative to the norm of their mean."""


class InformativeRows(NamedTuple):
    """The informative rows of a gradient, as unit vectors in whitened coordinates, in which no direction is preferred.

    rows:  the unit vectors, (M', R). back: (R, R) matrix that maps directions from whitened coordinates to those of the factors.
    level: (M',), standard deviation of each row's noise in the factors' coordinates, where it is equal in all directions, divided
           by the norm of the row in whitened coordinates.
    live:  mask (M,) of the informative rows, those that are more than noise, among all rows.
    """

    rows: Tensor
    back: Tensor
    level: Tensor
    live: Tensor

    @property
    def rank(self) -> int:
        return self.rows.shape[1]

    @staticmethod
    def of(factors: Factors) -> "InformativeRows":
        rows, noise = factors.coordinates[factors.live], factors.noise[factors.live]
        rank = rows.shape[1]
        eye = torch.eye(rank, dtype=rows.dtype, device=rows.device)
        length, back = rows.norm(dim=1), eye
        unit = rows / length[:, None]
        for _ in range(10):  # Tyler's estimator of the scatter matrix
            scatter = unit.T @ unit * (rank / max(len(unit), 1))
            values, vectors = torch.linalg.eigh(scatter)
            back = back @ vectors * values.clamp(min=float(values[-1]) * 1e-14).rsqrt()
            unit = rows @ back
            length = unit.norm(dim=1)
            unit = unit / length[:, None]
        return InformativeRows(unit, back, noise / length, factors.live)

    def compute_tolerance(self, q: Tensor) -> Tensor:
        """Return the magnitude up to which a row's component along unit directions q (K, R) is zero, (K, M')."""
        return compute_zero_threshold(self.compute_noise(q), self.rank**-0.5)

    def compute_noise(self, q: Tensor) -> Tensor:
        """Return the standard deviation of the noise of each of the M' rows along unit directions q (K, R), (K, M')."""
        result: Tensor = (q @ self.back.T).norm(dim=1)[:, None] * self.level[None]
        return result


def score_likely_on(factors: Factors, forward: Tensor, on: Tensor, rng: Generator) -> Tensor:
    """Return random scores (SAMPLES_PER_BATCH, M') of how likely each informative neuron is on, standardised per sample.

    A ridge logistic regression on the neurons' weights predicts which neurons are on for a mean example. Each sample then uses a
    random point around that mean. forward: (M, R), the layer's [W, b] in the coordinates of the basis. on: mask (M, K) of the
    neurons that are on for the K examples found so far.
    """
    unit = normalise_rows(forward)
    share = factors.live.to(unit.dtype)
    if on.shape[1]:
        share = share * (0.1 + 0.8 * on.to(unit.dtype).mean(dim=1))
    mean = fit_logistic(unit, share[:, None], torch.ones_like(share[:, None]))[0]
    around = torch.randn(SAMPLES_PER_BATCH, len(mean), generator=rng, dtype=unit.dtype).to(unit.device)
    around = (
        around
        / around.norm(dim=1, keepdim=True)
        * torch.rand(SAMPLES_PER_BATCH, 1, generator=rng, dtype=unit.dtype).to(unit.device)
    )
    likely = (mean + 2 * EXAMPLE_SPREAD * mean.norm() * around) @ unit[factors.live].T
    centred = likely - likely.mean(dim=1, keepdim=True)
    result: Tensor = centred / centred.std(dim=1, keepdim=True).clamp(min=torch.finfo(unit.dtype).tiny)
    return result


def sample_directions(space: InformativeRows, likely: Tensor, rng: Generator) -> Tensor:
    """Sample unit directions (K, R), each orthogonal to R - 1 independent rows that are drawn without replacement.

    likely: (N, M') scores of `score_likely_on`; rows that are probably off tend to be drawn first. K is N, less the samples with
    too few independent rows.
    """
    low, high = SHARPNESS_RANGE
    drawn = torch.rand(len(likely), 1, generator=rng, dtype=likely.dtype).to(likely.device)
    sharp = low * (high / low) ** drawn
    uniform = torch.rand(likely.shape, generator=rng, dtype=likely.dtype).to(likely.device)
    order = (-(-uniform.clamp(min=1e-300).log()).log() - sharp * likely).topk(min(4 * space.rank, likely.shape[1]), dim=1).indices
    return _find_orthogonal(space.rows, order)


def _find_orthogonal(rows: Tensor, order: Tensor) -> Tensor:
    """Return for each sequence of row indices, a row of `order` (N, K), the direction orthogonal to R - 1 of its rows.

    These are its first R - 1 linearly independent rows; dependent ones are skipped. Sequences with fewer are left out.
    """
    count, rank = len(order), rows.shape[1]
    left = torch.eye(rank, dtype=rows.dtype, device=rows.device).repeat(count, 1, 1)
    taken = torch.zeros(count, dtype=torch.long, device=rows.device)
    for k in range(order.shape[1]):
        new = left @ rows[order[:, k], :, None]
        power = new.square().sum(dim=(1, 2))
        take = (power > MAX_ZERO_COMPONENT**2) & (taken < rank - 1)
        new = new * torch.where(take, power.clamp(min=MAX_ZERO_COMPONENT**2).rsqrt(), 0)[:, None, None]
        left = torch.baddbmm(left, new, new.mT, alpha=-1)
        taken += take
        if bool((taken == rank - 1).all()):
            break
    left = left[taken == rank - 1]
    column = left.diagonal(dim1=1, dim2=2).argmax(dim=1)
    q = left[torch.arange(len(left), device=rows.device), :, column]
    result: Tensor = q / q.norm(dim=1, keepdim=True)
    return result
