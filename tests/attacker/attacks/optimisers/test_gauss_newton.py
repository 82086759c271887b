"""Tests of Gauss-Newton steps on least squares whose solution is known."""

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from attacker.attacks.optimisers.gauss_newton import Derivative, LeastSquares, Linearisation, minimise_squares


def make_problem(*, off: float = 0.0) -> tuple[LeastSquares, Tensor]:
    """Return a problem of 40 equations for 6 unknowns with singular values from 1 to 1e-4, and its solution.

    off: relative error of the approximate Jacobian.
    """
    rng = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(40, 6, generator=rng, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(6, 6, generator=rng, dtype=torch.float64))[0]
    matrix = left * torch.logspace(0, -4, 6, dtype=torch.float64) @ right
    solution = torch.randn(6, generator=rng, dtype=torch.float64)
    error = off * torch.randn(40, 6, generator=rng, dtype=torch.float64)

    def residual(z: Tensor) -> Tensor:
        moved = matrix @ (z - solution)
        return moved + 0.3 * moved**2

    def linearise(z: Tensor) -> Linearisation:
        return Linearisation((jacrev(residual)(z) * (1 + error)).float(), lambda z: multiply_by(jacrev(residual)(z)))

    return LeastSquares(residual, linearise), solution


def multiply_by(jacobian: Tensor) -> Derivative:
    return Derivative(lambda d: jacobian @ d, lambda r: jacobian.T @ r)


@pytest.mark.parametrize("off", [0.0, 0.05])
def test_solution_is_reached_also_with_an_approximate_jacobian(off: float) -> None:
    problem, solution = make_problem(off=off)
    found = minimise_squares(problem, solution + 0.3, steps=20)
    torch.testing.assert_close(found.z, solution, rtol=0, atol=1e-6)
    assert found.norm < 1e-10


def test_norm_of_the_residual_never_grows_far_from_the_solution() -> None:
    problem, _ = make_problem()
    norms: list[float] = []
    start = torch.full((6,), 30.0, dtype=torch.float64)
    found = minimise_squares(problem, start, steps=15, progress=lambda step, norm: norms.append(norm))
    assert norms == sorted(norms, reverse=True)
    assert found.norm < 0.1 * float(problem.residual(start).norm())


@pytest.mark.parametrize("reused", [False, True])
def test_errors_in_a_span_that_is_projected_out_do_not_move_the_solution(reused: bool) -> None:
    problem, solution = make_problem()
    basis = torch.linalg.qr(torch.randn(40, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64))[0]
    error = 0.1 * basis.sum(dim=1)
    wrong = LeastSquares(lambda z: problem.residual(z) + error, problem.linearise)
    linear = problem.linearise(solution + 0.1).project_out(basis) if reused else None
    found = minimise_squares(wrong.project_out(basis), solution + 0.1, steps=20, linear=linear)
    torch.testing.assert_close(found.z, solution, rtol=0, atol=1e-6)
    assert found.norm < 1e-10
    shifted = minimise_squares(wrong, solution + 0.1, steps=20)
    assert float((shifted.z - solution).norm()) > 0.1


def test_solution_of_inconsistent_equations_is_that_of_least_squares() -> None:
    """The reference is a library's linear least squares."""
    rng = torch.Generator().manual_seed(1)
    matrix, values = torch.randn(9, 4, generator=rng, dtype=torch.float64), torch.randn(9, generator=rng, dtype=torch.float64)
    problem = LeastSquares(lambda z: matrix @ z - values, lambda z: Linearisation(matrix, lambda z: multiply_by(matrix)))
    found = minimise_squares(problem, torch.zeros(4, dtype=torch.float64), steps=9)
    torch.testing.assert_close(found.z, torch.linalg.lstsq(matrix, values[:, None]).solution[:, 0])
    assert found.steps == 1  # it does not halve the norm, so that no other one follows


def test_steps_reach_the_solution_with_the_jacobian_of_the_start_alone() -> None:
    """Products are those of the Jacobian at each point; only the preconditioner is old."""
    problem, solution = make_problem()
    points: list[Tensor] = []

    def linearise(z: Tensor) -> Linearisation:
        points.append(z)
        return problem.linearise(z)

    found = minimise_squares(LeastSquares(problem.residual, linearise), solution + 0.3, steps=20, enough=1e-6)
    assert len(points) == 1
    torch.testing.assert_close(found.z, solution, rtol=0, atol=1e-6)
