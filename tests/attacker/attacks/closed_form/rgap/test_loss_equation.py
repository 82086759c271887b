"""Tests of the equation for the logit of a network with one output, given the product of its weight and its gradient."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from attacker.attacks.closed_form.rgap.heads import LOSS_EQUATION_MINIMISER, LOSS_EQUATION_MINIMUM, solve_logistic

F64 = torch.float64


def compute_product(mu: float) -> float:
    """Compute <gradient, weight> of a single logit: mu times the derivative of log(1 + exp(-mu))."""
    return -mu / (1 + np.exp(mu))


def find_roots(s: float) -> tuple[float, float, bool, bool]:
    lower, upper, two, clamped = solve_logistic(torch.tensor([s], dtype=F64))
    return lower.item(), upper.item(), bool(two), bool(clamped)


def test_constants_are_the_minimum_of_the_loss_equation() -> None:
    assert np.exp(LOSS_EQUATION_MINIMISER) * (LOSS_EQUATION_MINIMISER - 1) == pytest.approx(1, abs=1e-14)
    assert compute_product(LOSS_EQUATION_MINIMISER) == pytest.approx(LOSS_EQUATION_MINIMUM, abs=1e-15)
    assert (
        compute_product(LOSS_EQUATION_MINIMISER - 1e-3) > LOSS_EQUATION_MINIMUM < compute_product(LOSS_EQUATION_MINIMISER + 1e-3)
    )


@pytest.mark.parametrize("s", [1e-12, 1e-6, 0.1, 1.0, 5.0, 40.0, 700.0])
def test_positive_value_has_one_root_that_agrees_with_brent(s: float) -> None:
    lower, _, two, clamped = find_roots(s)
    assert lower == pytest.approx(brentq(lambda mu: compute_product(mu) - s, -2 * s - 1, 0, xtol=1e-300, rtol=1e-14), rel=1e-12)
    assert lower < 0
    assert not two
    assert not clamped


@pytest.mark.parametrize("s", [-1e-12, -1e-6, -0.01, -0.1, -0.2, -0.27, -0.2784])
def test_negative_value_has_two_roots_that_agree_with_brent(s: float) -> None:
    lower, upper, two, clamped = find_roots(s)
    assert lower == pytest.approx(
        brentq(lambda mu: compute_product(mu) - s, 0, LOSS_EQUATION_MINIMISER, xtol=1e-300, rtol=1e-14), rel=1e-9
    )
    assert upper == pytest.approx(brentq(lambda mu: compute_product(mu) - s, LOSS_EQUATION_MINIMISER, 100, rtol=1e-14), rel=1e-9)
    assert two
    assert not clamped


@given(st.floats(-700, 700))
@settings(deadline=None, max_examples=100)
def test_true_logit_is_one_of_the_roots(mu: float) -> None:
    with np.errstate(over="ignore"):
        s = float(-mu * torch.tensor(-mu, dtype=F64).sigmoid())
    lower, upper, two, clamped = find_roots(s)
    assert not clamped or s - LOSS_EQUATION_MINIMUM > -1e-15
    wanted = lower if mu < LOSS_EQUATION_MINIMISER else upper
    near_turn = 1e-7 if abs(mu - LOSS_EQUATION_MINIMISER) < 0.01 else 1e-12
    assert wanted == pytest.approx(mu, rel=1e-9, abs=near_turn + 1e-300)
    assert two == (mu > 0 and s < 0) or abs(mu - LOSS_EQUATION_MINIMISER) < 1e-6


@pytest.mark.parametrize("s", [LOSS_EQUATION_MINIMUM - 1e-6, -0.3, -5.0, -1e9])
def test_value_below_the_minimum_is_clamped_to_it(s: float) -> None:
    lower, _, two, clamped = find_roots(s)
    assert clamped
    assert not two
    assert lower == pytest.approx(LOSS_EQUATION_MINIMISER, abs=1e-6)


def test_value_zero_has_the_root_zero() -> None:
    assert find_roots(0.0)[0] == pytest.approx(0, abs=1e-20)
    assert not find_roots(0.0)[2]
