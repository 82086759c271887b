"""Tests of the fit of the most probable features and labels to the last layer's gradient."""

import pytest
import torch
from torch import Tensor, nn

from attacker.attacks.labels.counts import estimate_by_balance, round_counts
from attacker.attacks.labels.fit import (
    FINE_ERROR,
    HeadFit,
    LabelCandidates,
    build_head_fit,
    compute_cost,
    find_most_probable,
    fit_features,
)

CLASSES, FEATURES = 6, 12


class Batch:
    """A batch of normal features, with labels drawn from the last layer's predictions, and that layer's gradient."""

    def __init__(self, seed: int, examples: int, certainty: float = 2.0) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.weight = certainty * torch.randn(CLASSES, FEATURES, generator=self.rng, dtype=torch.float64)
        self.offset = torch.randn(CLASSES, generator=self.rng, dtype=torch.float64)
        self.f, others = self.features(examples), self.features(200)
        p = (self.f @ self.weight.T + self.offset).softmax(dim=1)
        self.y = torch.multinomial(p, 1, generator=self.rng)[:, 0]
        residual = (p - nn.functional.one_hot(self.y, CLASSES)) / examples
        self.rows, self.bias, self.guess = residual.T @ self.f, residual.sum(dim=0), p.mean(dim=0)
        self.others = others

    def features(self, count: int) -> Tensor:
        return torch.randn(count, FEATURES, generator=self.rng, dtype=torch.float64) + 0.5

    def fit(self, *, bias: bool = True) -> HeadFit:
        return build_head_fit(self.rows, self.bias if bias else None, self.weight, self.offset, self.others, len(self.y))

    def start(self) -> Tensor:
        """Return counts from the bias's gradient, with probabilities estimated from other inputs."""
        guess = (self.others @ self.weight.T + self.offset).softmax(dim=1).mean(dim=0)
        return round_counts(estimate_by_balance(self.bias, guess, len(self.y)), len(self.y))

    def counts(self) -> Tensor:
        return torch.bincount(self.y, minlength=CLASSES)


def overlap(a: Tensor, b: Tensor) -> float:
    return float(torch.minimum(a, b).sum() / a.sum())


@pytest.mark.parametrize("bias", [True, False])
def test_true_features_and_labels_have_only_the_prior_cost(bias: bool) -> None:
    batch = Batch(0, 5)
    fit = batch.fit(bias=bias)
    z = torch.linalg.solve_triangular(fit.spread, (batch.f @ _basis(batch, fit).T - fit.mean).T, upper=False).T[None]
    y = torch.eye(CLASSES, dtype=torch.float64)[batch.y][None]
    loose, strict = compute_cost(fit, z, y, 1.0), compute_cost(fit, z, y, 1e-4)
    torch.testing.assert_close(loose, strict)
    log_p = (batch.f @ batch.weight.T + batch.offset).log_softmax(dim=1)[torch.arange(5), batch.y].sum()
    torch.testing.assert_close(strict[0], 0.5 * z.square().sum() - log_p)


def _basis(batch: Batch, fit: HeadFit) -> Tensor:
    """Return the fit's orthonormal basis, computed from the weight in that basis and in full."""
    return torch.linalg.lstsq(fit.weight, batch.weight).solution if fit.weight.shape[0] >= FEATURES else _by_rows(batch, fit)


def _by_rows(batch: Batch, fit: HeadFit) -> Tensor:
    known = torch.cat([fit.weight, fit.target[:, : fit.weight.shape[1]]])
    return torch.linalg.lstsq(known, torch.cat([batch.weight, batch.rows[:-1]])).solution


@pytest.mark.parametrize("seed", range(3))
def test_fit_ends_at_a_lower_cost_with_a_small_slope(seed: int) -> None:
    batch = Batch(seed, 6)
    fit = batch.fit()
    y = torch.eye(CLASSES, dtype=torch.float64)[batch.y][None]
    start = LabelCandidates(y, 0.1 * fit.start[None, :6], torch.zeros(1))
    end = fit_features(fit, start, FINE_ERROR, steps=40)
    z = end.z.clone().requires_grad_()
    value = compute_cost(fit, z, y, FINE_ERROR * fit.scale).sum()
    (slope,) = torch.autograd.grad(value, z)
    assert value < compute_cost(fit, start.z, y, FINE_ERROR * fit.scale).sum()
    assert slope.abs().max() < 0.05  # the curvature is 1 or more


def test_a_step_makes_no_candidate_worse() -> None:
    batch = Batch(4, 8)
    fit = batch.fit()
    y = torch.eye(CLASSES, dtype=torch.float64)[torch.randint(CLASSES, (5, 8), generator=batch.rng)]
    now = LabelCandidates(y, fit.start[:8].expand(5, -1, -1), torch.full((5,), torch.inf))
    for _ in range(4):
        then = fit_features(fit, now, FINE_ERROR, steps=1)
        assert (then.cost <= now.cost).all()
        now = then


def test_fit_finds_more_labels_of_few_examples_than_the_bias() -> None:
    batches = [Batch(seed, 3, certainty=0.6) for seed in range(10)]
    by_bias = [overlap(batch.counts(), batch.start()) for batch in batches]
    found = [overlap(batch.counts(), find_most_probable(batch.fit(), [batch.start()])) for batch in batches]
    assert sum(found) > sum(by_bias) + 0.5
    assert sum(found) >= 9


def test_fit_finds_labels_without_a_bias() -> None:
    batches = [Batch(seed, 3, certainty=0.6) for seed in range(10)]
    found = [overlap(batch.counts(), find_most_probable(batch.fit(bias=False), [batch.start()])) for batch in batches]
    assert sum(found) >= 9


def test_most_probable_of_several_starts_is_returned() -> None:
    batch = Batch(1, 3, certainty=0.6)
    wrong = torch.bincount(torch.full((3,), int(batch.counts().argmin())), minlength=CLASSES)
    assert find_most_probable(batch.fit(), [wrong, batch.counts()]).tolist() == batch.counts().tolist()
    assert find_most_probable(batch.fit(), [batch.counts(), wrong]).tolist() == batch.counts().tolist()


@pytest.mark.parametrize("seed", range(3))
def test_counts_follow_the_order_of_classes(seed: int) -> None:
    batch, order = Batch(seed, 3, certainty=0.6), torch.tensor([2, 0, 3, 1, 5, 4])
    plain = find_most_probable(batch.fit(), [batch.start()])
    turned = build_head_fit(batch.rows[order], batch.bias[order], batch.weight[order], batch.offset[order], batch.others, 3)
    assert find_most_probable(turned, [batch.start()[order]]).tolist() == plain[order].tolist()
