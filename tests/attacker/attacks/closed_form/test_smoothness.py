"""Tests that the priors' slopes are their derivatives, and that their curvatures give upper bounds."""

import pytest
import torch
from torch import Tensor

from attacker.attacks.closed_form.peeling.smoothness import (
    MidpointPrior,
    SmoothnessPrior,
    TotalVariation,
    compute_differences,
    transpose_differences,
)

PRIORS: list[SmoothnessPrior] = [TotalVariation(0.05), MidpointPrior()]


def draw(seed: int, *, count: int = 3) -> Tensor:
    return torch.rand(count, 2, 5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("prior", PRIORS)
def test_slope_is_the_derivative(prior: SmoothnessPrior) -> None:
    x = draw(0).requires_grad_()
    (expected,) = torch.autograd.grad(prior.value(x).sum(), x)
    torch.testing.assert_close(prior.gradient(x.detach()), expected)


@pytest.mark.parametrize("prior", PRIORS)
def test_quadratic_of_slope_and_curvature_is_an_upper_bound(prior: SmoothnessPrior) -> None:
    x = draw(0)
    for seed in range(1, 20):
        d = draw(seed) - x
        bend = (d * prior.curvature(x)(d)).flatten(1).sum(dim=1) / 2
        above = prior.value(x) + (d * prior.gradient(x)).flatten(1).sum(dim=1) + bend
        assert (above >= prior.value(x + d) - 1e-12).all()


@pytest.mark.parametrize("prior", PRIORS)
def test_value_of_an_example_does_not_depend_on_others(prior: SmoothnessPrior) -> None:
    x = draw(0)
    torch.testing.assert_close(prior.value(x)[1:2], prior.value(x[1:2]))


def test_total_variation_of_a_step_is_its_height_times_its_length() -> None:
    x = torch.zeros(1, 2, 6, 6, dtype=torch.float64)
    x[..., 3:] = 0.7  # in both channels, over six rows
    torch.testing.assert_close(TotalVariation(1e-9).value(x), torch.tensor([2 * 6 * 0.7], dtype=torch.float64))
    assert TotalVariation(0.1).value(x) < TotalVariation(1e-9).value(x)
    assert TotalVariation(0.1).value(torch.full_like(x, 0.3)) == 0


def test_transposed_differences_are_adjoint_to_differences() -> None:
    x = torch.tensor([[[[1.0, 3.0], [6.0, 10.0]]]])
    across, down = compute_differences(x)
    assert across.tolist() == [[[[2, 0], [4, 0]]]]
    assert down.tolist() == [[[[5, 7], [0, 0]]]]
    a, b, v = draw(1), draw(2), draw(3)
    there = sum((s * t).sum() for s, t in zip((a, b), compute_differences(v), strict=True))
    torch.testing.assert_close(there, (transpose_differences(a, b) * v).sum())
