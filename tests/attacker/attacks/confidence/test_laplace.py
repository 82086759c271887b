"""Tests of the Laplace approximation on linear problems, whose posterior is known."""

import pytest
import torch
from generators import seeded
from torch import Tensor

from attacker.attacks.confidence.laplace import PRIOR_VARIANCE, Posterior


def linear(rows: int, columns: int = 12) -> tuple[Tensor, Tensor]:
    """Return a random linear problem: a matrix and a right-hand side."""
    rng = seeded(3)
    return torch.randn(rows, columns, generator=rng).double(), torch.randn(rows, generator=rng).double()


@pytest.mark.parametrize(("rows", "variance"), [(6, 1e-6), (12, 1e-2), (40, 1e-2), (40, 10.0)])
def test_the_expected_error_is_the_mean_variance_of_the_posterior(rows: int, variance: float) -> None:
    a, b = linear(rows)
    noise = torch.tensor(variance).double()
    covariance = torch.linalg.inv(a.T @ a / noise + torch.eye(12).double() / PRIOR_VARIANCE)
    posterior = Posterior(lambda x: (a @ x.flatten() - b,), torch.zeros(3, 4).double(), noise, iterations=30)
    drawn = torch.stack([posterior.estimate_error(seeded(i)) for i in range(80)]).mean(dim=0)
    wanted = covariance.diagonal().reshape(3, 4).mean(dim=1)
    assert torch.allclose(drawn, wanted, rtol=0.5, atol=2e-9)


def test_estimated_next_step_is_that_to_the_least_squares_solution() -> None:
    a, b = linear(40)
    variance = torch.tensor(1e-12).double()
    posterior = Posterior(lambda x: (a @ x.flatten() - b,), torch.zeros(3, 4).double(), variance, iterations=30)
    solution = torch.linalg.lstsq(a, b[:, None]).solution.reshape(3, 4)
    assert torch.allclose(posterior.estimate_next_step(), solution.square().mean(dim=1), rtol=1e-6)


def test_values_without_a_residual_keep_the_prior_variance() -> None:
    posterior = Posterior(lambda x: (x[0],), torch.zeros(2, 4).double(), torch.tensor(1e-9).double())
    seen, unseen = posterior.estimate_error(seeded()).tolist()
    assert seen < 1e-8
    assert unseen == pytest.approx(PRIOR_VARIANCE)


def test_residuals_in_parts_give_the_same_result() -> None:
    a, b = linear(40)
    start, variance = torch.full((3, 4), 0.1).double(), torch.tensor(1e-2).double()

    def compute(x: Tensor) -> Tensor:
        return (a @ x.flatten()).tanh() - b

    whole, parts = (Posterior(one, start, variance) for one in (lambda x: (compute(x),), lambda x: compute(x).split(7)))
    assert torch.allclose(whole.estimate_error(seeded()), parts.estimate_error(seeded()))
    assert torch.allclose(whole.estimate_next_step(), parts.estimate_next_step())
