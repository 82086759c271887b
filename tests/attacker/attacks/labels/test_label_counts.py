"""Tests of label counts computed from the gradient of the last layer."""

import pytest
import torch
from torch import Tensor, nn

from attacker.attacks.labels.counts import (
    choose_most_integer,
    count_by_impact,
    estimate_bias_gradient,
    estimate_by_balance,
    estimate_by_class_features,
    estimate_from_sent_entries,
    round_counts,
    solve_bias_gradient,
)


def head_gradient(features: Tensor, y: Tensor, weight: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias of a last layer for softmax cross-entropy, by autograd."""
    weight, offset = weight.clone().requires_grad_(), offset.clone().requires_grad_()
    loss = nn.functional.cross_entropy(features @ weight.T + offset, y)
    rows, bias = torch.autograd.grad(loss, (weight, offset))
    return rows, bias


def test_the_largest_remainders_are_rounded_up() -> None:
    assert round_counts(torch.tensor([1.6, 0.2, 2.2]), 4).tolist() == [2, 0, 2]
    assert round_counts(torch.tensor([3.0, -1.0, 1.0]), 8).tolist() == [6, 0, 2]


@pytest.mark.parametrize(
    "counts", [torch.zeros(4), -torch.ones(4), torch.tensor([torch.nan, 1, 1, 1]), torch.full((4,), torch.inf)]
)
def test_useless_counts_give_equal_shares(counts: Tensor) -> None:
    assert sorted(round_counts(counts, 6).tolist()) == [1, 1, 2, 2]


def test_counts_by_balance_of_a_hand_example() -> None:
    # labels 0, 0, 1 of three classes, and p = (1/2, 1/4, 1/4) for all: g = p - (2/3, 1/3, 0)
    p = torch.tensor([1 / 2, 1 / 4, 1 / 4])
    assert estimate_by_balance(p - torch.tensor([2 / 3, 1 / 3, 0]), p, 3).tolist() == pytest.approx([2, 1, 0], abs=1e-6)


def test_counts_by_impact_of_a_hand_example() -> None:
    # n = 4, K = 4: impact -(1.4 + 0.4) * 5/4 / 4 = -0.5625; each negative class once leaves -0.8375 and 0.1625
    assert count_by_impact(torch.tensor([-1.4, 0.9, -0.4, 0.9]), 4).tolist() == [3, 0, 1, 0]
    # impact -1 * 5/4 / 4 = -0.3125; -0.2875 and -0.0875 are left, so that each gets one more; with 3/4 for 5/4 both went to one
    assert count_by_impact(torch.tensor([-0.6, 0.5, -0.4, 0.5]), 4).tolist() == [2, 0, 2, 0]


def test_most_negative_classes_come_first_if_there_are_too_many() -> None:
    assert count_by_impact(torch.tensor([-1.0, -3.0, -2.0, 6.0]), 2).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("seed", range(4))
def test_counts_by_class_features_are_exact_for_nearly_constant_logits(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    weight, offset = 1e-3 * torch.randn(5, 7, generator=rng), torch.randn(5, generator=rng)  # the mean p is not uniform
    y = torch.tensor([0, 1, 1, 1, 3, 3, 4, 4, 4, 4, 4])
    rows, bias = head_gradient(torch.rand(len(y), 7, generator=rng), y, weight, offset)
    counts = estimate_by_class_features(rows, bias, weight, offset, len(y))
    assert counts.tolist() == pytest.approx([1, 3, 0, 2, 5], abs=0.1)


def test_counts_by_class_features_have_the_right_sum_for_any_gradient() -> None:
    for value in (0.0, torch.nan, torch.inf, 1e30):
        rows, bias = torch.full((3, 4), value), torch.full((3,), value)
        counts = estimate_by_class_features(rows, bias, torch.ones(3, 4), torch.ones(3), 5)
        assert round_counts(counts, 5).sum() == 5


def test_estimate_nearest_to_integers_is_chosen() -> None:
    vague, sharp, infinite = torch.tensor([1.3, 0.2, 1.5]), torch.tensor([0.1, 2.9, 0.0]), torch.full((3,), torch.inf)
    for estimates in ([vague, sharp], [sharp, vague], [infinite, sharp]):
        assert choose_most_integer(estimates, 3).tolist() == [0, 3, 0]
    # Estimates of the right sum can be integers, but not counts.
    assert choose_most_integer([torch.tensor([5.0, -3.0, 1.0]), vague], 3).tolist() == [1, 0, 2]
    assert choose_most_integer([infinite], 3).sum() == 3


@pytest.mark.parametrize("classes", [5, 7, 40])
def test_bias_gradient_follows_from_the_derivatives_by_the_inputs_of_the_head(classes: int) -> None:
    """With fewer inputs than classes (7 and 5 are at most 8, 40 is more), the counts are still found."""
    rng = torch.Generator().manual_seed(classes)
    weight, y = 0.1 * torch.randn(classes, 8, generator=rng), torch.tensor([0, 3, 3])
    features = torch.randn(3, 8, generator=rng).requires_grad_()
    loss = nn.functional.cross_entropy(features @ weight.T, y)
    (slope,) = torch.autograd.grad(loss, features)
    p = (features @ weight.T).softmax(dim=1).mean(dim=0).detach()
    true = p - torch.bincount(y, minlength=classes) / 3
    guess = torch.full((classes,), 1 / classes) if classes == 40 else torch.rand(classes, generator=rng)
    solved = solve_bias_gradient(slope.sum(dim=0), weight, guess)
    if classes <= 8:
        assert torch.allclose(solved, true, atol=1e-5)  # whatever the guess
    assert round_counts(estimate_by_balance(solved, p, 3), 3).tolist() == torch.bincount(y, minlength=classes).tolist()


def test_estimated_bias_gradient_is_right_if_one_feature_is_constant() -> None:
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(40, 6, generator=rng)
    features[:, 2] = 3.0  # constant, like the input of a bias
    weight, offset = torch.randn(4, 6, generator=rng), torch.zeros(4)
    rows, bias = head_gradient(features[:7], torch.tensor([0, 1, 1, 2, 3, 3, 3]), weight, offset)
    torch.testing.assert_close(estimate_bias_gradient(rows, features[7:]), bias, atol=5e-3, rtol=0)


def test_estimate_from_sent_entries_is_the_factor_of_the_mean_features() -> None:
    rng = torch.Generator().manual_seed(0)
    features = torch.rand(50, 20, generator=rng) + 1
    true = torch.tensor([-0.4, 0.1, 0.3])
    rows = true[:, None] * features.mean(dim=0)
    rows[0, ::2], rows[2] = 0.0, 0.0
    torch.testing.assert_close(estimate_from_sent_entries(rows, features), torch.tensor([-0.4, 0.1, 0.0]))
