"""Tests of the fit of the most probable features and labels to the last layer's gradient."""

import pytest
import torch
from torch import Tensor, nn

from attacker.attacks.labels.counts import count_by_balance
from attacker.attacks.labels.fit import (
    FINE_ERROR,
    Fitted,
    HeadFit,
    build_head_fit,
    compute_cost,
    find_most_probable,
    fit_features,
)

CLASSES, FEATURES = 6, 12


class World:
    """Normal features with labels drawn from the predictions of the last layer: a calibrated, mostly certain model."""

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
        return count_by_balance(self.bias, guess, len(self.y))

    def counts(self) -> Tensor:
        return torch.bincount(self.y, minlength=CLASSES)


def overlap(a: Tensor, b: Tensor) -> float:
    return float(torch.minimum(a, b).sum() / a.sum())


@pytest.mark.parametrize("bias", [True, False])
def test_true_features_and_labels_miss_nothing(bias: bool) -> None:
    world = World(0, 5)
    fit = world.fit(bias=bias)
    z = torch.linalg.solve_triangular(fit.spread, (world.f @ _basis(world, fit).T - fit.mean).T, upper=False).T[None]
    y = torch.eye(CLASSES, dtype=torch.float64)[world.y][None]
    loose, strict = compute_cost(fit, z, y, 1.0), compute_cost(fit, z, y, 1e-4)
    torch.testing.assert_close(loose, strict)
    log_p = (world.f @ world.weight.T + world.offset).log_softmax(dim=1)[torch.arange(5), world.y].sum()
    torch.testing.assert_close(strict[0], 0.5 * z.square().sum() - log_p)


def _basis(world: World, fit: HeadFit) -> Tensor:
    """Return the fit's orthonormal basis, computed from the weight in that basis and in full."""
    return torch.linalg.lstsq(fit.weight, world.weight).solution if fit.weight.shape[0] >= FEATURES else _by_rows(world, fit)


def _by_rows(world: World, fit: HeadFit) -> Tensor:
    known = torch.cat([fit.weight, fit.target[:, : fit.weight.shape[1]]])
    return torch.linalg.lstsq(known, torch.cat([world.weight, world.rows[:-1]])).solution


@pytest.mark.parametrize("seed", range(3))
def test_a_fit_ends_where_the_cost_is_flat_and_lower(seed: int) -> None:
    world = World(seed, 6)
    fit = world.fit()
    y = torch.eye(CLASSES, dtype=torch.float64)[world.y][None]
    start = Fitted(y, 0.1 * fit.start[None, :6], torch.zeros(1))
    end = fit_features(fit, start, FINE_ERROR, steps=40)
    z = end.z.clone().requires_grad_()
    value = compute_cost(fit, z, y, FINE_ERROR * fit.scale).sum()
    (slope,) = torch.autograd.grad(value, z)
    assert value < compute_cost(fit, start.z, y, FINE_ERROR * fit.scale).sum()
    assert slope.abs().max() < 0.05  # the curvature is 1 or more


def test_a_step_makes_no_candidate_worse() -> None:
    world = World(4, 8)
    fit = world.fit()
    y = torch.eye(CLASSES, dtype=torch.float64)[torch.randint(CLASSES, (5, 8), generator=world.rng)]
    now = Fitted(y, fit.start[:8].expand(5, -1, -1), torch.full((5,), torch.inf))
    for _ in range(4):
        then = fit_features(fit, now, FINE_ERROR, steps=1)
        assert (then.cost <= now.cost).all()
        now = then


def test_labels_of_few_examples_are_found_where_the_bias_misleads() -> None:
    worlds = [World(seed, 3, certainty=0.6) for seed in range(10)]
    by_bias = [overlap(world.counts(), world.start()) for world in worlds]
    found = [overlap(world.counts(), find_most_probable(world.fit(), [world.start()])) for world in worlds]
    assert sum(found) > sum(by_bias) + 0.5
    assert sum(found) >= 9


def test_the_head_without_a_bias_tells_as_well() -> None:
    worlds = [World(seed, 3, certainty=0.6) for seed in range(10)]
    found = [overlap(world.counts(), find_most_probable(world.fit(bias=False), [world.start()])) for world in worlds]
    assert sum(found) >= 9


def test_of_several_starts_the_most_probable_is_taken() -> None:
    world = World(1, 3, certainty=0.6)
    wrong = torch.bincount(torch.full((3,), int(world.counts().argmin())), minlength=CLASSES)
    assert find_most_probable(world.fit(), [wrong, world.counts()]).tolist() == world.counts().tolist()
    assert find_most_probable(world.fit(), [world.counts(), wrong]).tolist() == world.counts().tolist()


@pytest.mark.parametrize("seed", range(3))
def test_classes_in_another_order_have_their_counts_in_that_order(seed: int) -> None:
    world, order = World(seed, 3, certainty=0.6), torch.tensor([2, 0, 3, 1, 5, 4])
    plain = find_most_probable(world.fit(), [world.start()])
    turned = build_head_fit(world.rows[order], world.bias[order], world.weight[order], world.offset[order], world.others, 3)
    assert find_most_probable(turned, [world.start()[order]]).tolist() == plain[order].tolist()
