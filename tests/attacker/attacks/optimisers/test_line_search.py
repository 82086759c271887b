"""Tests that batched line searches fulfil the strong Wolfe conditions, and that L-BFGS with them agrees with PyTorch's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attacker.attacks.optimisers.lbfgs import LBFGS, SearchingStepper
from attacker.attacks.optimisers.line_search import MAX_TRIALS, LineSearches

Curve = Callable[[Tensor], Tensor]


def rosenbrock(z: Tensor) -> Tensor:
    return (100 * (z[..., 1:] - z[..., :-1] ** 2) ** 2 + (1 - z[..., :-1]) ** 2).sum(-1)


def loss_and_gradient(z: Tensor) -> tuple[Tensor, Tensor]:
    leaf = z.clone().requires_grad_()
    loss = rosenbrock(leaf)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), gradient


def starts() -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return 1 + 0.4 * torch.randn(6, 5, generator=rng, dtype=torch.float64)


def test_lbfgs_with_line_searches_agrees_with_torch() -> None:
    z = starts()
    stepper = LBFGS(line_search=True).start()
    for _ in range(150):
        loss, gradient = loss_and_gradient(z)
        z = stepper.step(z, gradient, loss, 0.0)
    assert isinstance(stepper, SearchingStepper)
    for row, start in enumerate(starts()):
        leaf = start.clone().requires_grad_()
        theirs = torch.optim.LBFGS([leaf], max_iter=150, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe")

        def closure(leaf: Tensor = leaf, theirs: torch.optim.LBFGS = theirs) -> Tensor:
            theirs.zero_grad()
            loss = rosenbrock(leaf)
            loss.backward()
            return loss

        theirs.step(closure)
        torch.testing.assert_close(stepper.at["low"][row], leaf.detach(), rtol=0, atol=1e-6)


def search_on(loss: Curve, slope: Curve, first: float) -> tuple[Tensor, int]:
    """Return the step lengths found for functions of the length, one per problem, and the number of trials."""
    at = torch.zeros(len(loss(torch.zeros(1))), dtype=torch.float64)
    lines = LineSearches.from_slope(loss(at), slope(at), torch.full_like(at, first))
    ended = torch.zeros_like(at, dtype=torch.bool)
    answers, trials = torch.zeros_like(at), 0
    while not ended.all():
        _, over = lines.process_trial(loss(lines.length), slope(lines.length))
        answers = torch.where(over & ~ended, lines.low_length, answers)
        trials, ended = trials + 1, ended | over
    return answers, trials


@pytest.mark.parametrize("first", [1e-3, 0.3, 1.0, 50.0])
def test_found_lengths_fulfil_both_wolfe_conditions(first: float) -> None:
    centre = torch.tensor([0.01, 0.7, 1.0, 4.0, 30.0], dtype=torch.float64)

    def loss(t: Tensor) -> Tensor:
        return (t - centre) ** 2 + 0.2 * centre * torch.sin(t)

    def slope(t: Tensor) -> Tensor:
        return 2 * (t - centre) + 0.2 * centre * torch.cos(t)

    zero = torch.zeros_like(centre)
    t, trials = search_on(loss, slope, first)
    assert (t > 0).all()
    assert (loss(t) <= loss(zero) + 1e-4 * t * slope(zero)).all()
    assert (slope(t).abs() <= 0.9 * slope(zero).abs()).all()
    assert trials <= 12


def test_length_with_a_finite_loss_is_found() -> None:
    """The loss is not finite beyond one half, like that of a network that overflows."""

    def loss(t: Tensor) -> Tensor:
        return torch.where(t < 0.5, (t - 0.3) ** 2, torch.nan)[None].reshape(-1)

    def slope(t: Tensor) -> Tensor:
        return torch.where(t < 0.5, 2 * (t - 0.3), torch.nan).reshape(-1)

    length, trials = search_on(loss, slope, 8.0)
    assert 0 < float(length) < 0.5
    assert trials < 10


def test_line_that_does_not_descend_is_given_up() -> None:
    length, trials = search_on(lambda t: 1 + t.reshape(-1), lambda t: -torch.ones_like(t).reshape(-1), 1.0)
    assert float(length) == 0
    assert trials == MAX_TRIALS


def test_accepted_losses_never_increase() -> None:
    z, stepper = starts(), LBFGS(line_search=True).start()
    last = torch.full((len(z),), float("inf"), dtype=torch.float64)
    for _ in range(60):
        loss, gradient = loss_and_gradient(z)
        z = stepper.step(z, gradient, loss, 0.0)
        assert isinstance(stepper, SearchingStepper)
        now = rosenbrock(stepper.at["origin"])
        assert (now <= last).all()
        last = now
