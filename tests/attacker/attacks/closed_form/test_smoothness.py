"""Tests that the priors' slopes are their derivatives, and that their curvatures give upper bounds."""

import pytest
import torch
from torch import Tensor

from attacker.attacks.closed_form.peeling.smoothness import (
    Middle,
    SmoothnessPrior,
    TotalVariation,
    compute_differences,
    transpose_differences,
)

BELIEFS: list[SmoothnessPrior] = [TotalVariation(0.05), Middle()]


def draw(seed: int, *, count: int = 3) -> Tensor:
    return torch.rand(count, 2, 5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("belief", BELIEFS)
def test_slope_is_the_derivative(belief: SmoothnessPrior) -> None:
    x = draw(0).requires_grad_()
    (expected,) = torch.autograd.grad(belief.value(x).sum(), x)
    torch.testing.assert_close(belief.gradient(x.detach()), expected)


@pytest.mark.parametrize("belief", BELIEFS)
def test_the_quadratic_touches_at_x_and_is_nowhere_below(belief: SmoothnessPrior) -> None:
    x = draw(0)
    for seed in range(1, 20):
        d = draw(seed) - x
        bend = (d * belief.curvature(x)(d)).flatten(1).sum(dim=1) / 2
        above = belief.value(x) + (d * belief.gradient(x)).flatten(1).sum(dim=1) + bend
        assert (above >= belief.value(x + d) - 1e-12).all()


@pytest.mark.parametrize("belief", BELIEFS)
def test_each_example_counts_for_itself(belief: SmoothnessPrior) -> None:
    x = draw(0)
    torch.testing.assert_close(belief.value(x)[1:2], belief.value(x[1:2]))


def test_total_variation_of_a_step_is_its_height_along_its_length() -> None:
    x = torch.zeros(1, 2, 6, 6, dtype=torch.float64)
    x[..., 3:] = 0.7  # in both channels, over six rows
    torch.testing.assert_close(TotalVariation(1e-9).value(x), torch.tensor([2 * 6 * 0.7], dtype=torch.float64))
    assert TotalVariation(0.1).value(x) < TotalVariation(1e-9).value(x)
    assert TotalVariation(0.1).value(torch.full_like(x, 0.3)) == 0


def test_differences_and_their_transpose() -> None:
    x = torch.tensor([[[[1.0, 3.0], [6.0, 10.0]]]])
    across, down = compute_differences(x)
    assert across.tolist() == [[[[2, 0], [4, 0]]]]
    assert down.tolist() == [[[[5, 7], [0, 0]]]]
    a, b, v = draw(1), draw(2), draw(3)
    there = sum((s * t).sum() for s, t in zip((a, b), compute_differences(v), strict=True))
    torch.testing.assert_close(there, (transpose_differences(a, b) * v).sum())
