"""Gauss-Newton steps for nonlinear least squares, for searches that are near a solution and whose equations determine it.

Shapes: D unknowns, R equations.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp

from attacker.attacks.optimisers.conjugate_gradients import conjugate_gradients

DAMPING = 1e-12
"""First and smallest damping, relative to the largest diagonal entry of the normal matrix (Levenberg and Marquardt's lambda)."""
CHANGE_OF_DAMPING = 100.0
"""Factor by which the damping grows after a step that failed, and falls after one that did not."""
LINEAR_ITERATIONS = 100
"""Maximum number of iterations of conjugate gradients in a step. If a step takes them all, the next one is linearised anew."""
LINEAR_TOLERANCE = 1e-3
ROWS_AT_ONCE = 2048
"""Number of rows of a Jacobian that are converted to float64 at once."""
MIN_DECREASE = 0.05
"""Relative decrease of the residual's norm in a step below which the next step is linearised anew."""
MIN_NEW_DECREASE = 0.5
"""The same for a step that was linearised anew, below which the iteration ends: it is at a minimum or far from a solution."""


@dataclass(frozen=True)
class Derivative:
    """The Jacobian J (R, D) of a residual at a point, as products.

    along: maps d (D,) to J d, (R,). back: maps r (R,) to J^T r, (D,).
    """

    along: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Linearisation:
    """What is computed for one point and used at later ones, too, as long as it serves.

    jacobian: the approximate Jacobian at that point, (R, D), the preconditioner of the linear problem of each step.
    differentiate: maps a point (D,) to the derivative there.
    """

    jacobian: Tensor
    differentiate: Callable[[Tensor], Derivative]

    def project_out(self, basis: Tensor) -> "Linearisation":
        """Return the linearisation of the residual without its part in the span of an orthonormal basis, (R, E)."""

        def differentiate(z: Tensor) -> Derivative:
            slope = self.differentiate(z)
            return Derivative(lambda d: project_out(basis, slope.along(d)), lambda r: slope.back(project_out(basis, r)))

        return Linearisation(project_out(basis, self.jacobian), differentiate)


@dataclass(frozen=True)
class LeastSquares:
    """The problem to minimise |residual(z)|^2.

    residual: maps unknowns (D,) to a residual (R,), in float64; differentiated by `torch.func`.
    linearise: maps unknowns (D,) to a linearisation there.
    """

    residual: Callable[[Tensor], Tensor]
    linearise: Callable[[Tensor], Linearisation]

    def project_out(self, basis: Tensor) -> "LeastSquares":
        """Return the problem without the part of its residual in the span of an orthonormal basis, (R, E).

        Errors of the equations in this span then do not change the minimum.
        """
        return LeastSquares(lambda z: project_out(basis, self.residual(z)), lambda z: self.linearise(z).project_out(basis))


@dataclass(frozen=True)
class Minimum:
    """The result of `minimise_squares`: unknowns z (D,), the norm of the residual at z, and the number of steps.

    linear: the linearisation that the last step used; None if the next step would have made a new one.
    """

    z: Tensor
    norm: float
    steps: int
    linear: Linearisation | None = None


def minimise_squares(
    problem: LeastSquares,
    z: Tensor,
    *,
    steps: int,
    enough: float = 0.0,
    linear: Linearisation | None = None,
    progress: Callable[[int, float], None] = lambda step, norm: None,
) -> Minimum:
    """Minimise the norm of the residual from z (D,), in float64, by damped Gauss-Newton steps (Levenberg 1944, Marquardt 1963).

    Each step solves (J^T J + damping) d = -J^T r by conjugate gradients. The products by the Jacobian J on the left are those of
    the linearisation; its approximate Jacobian, factorised by Cholesky, is the preconditioner. Steps that do not decrease the
    norm are not taken; the damping then grows. The iteration ends after `steps` steps, or once a step with a new linearisation
    decreases the norm by less than `MIN_NEW_DECREASE`, relative to it. Once the norm is at most `enough`, a step with an old one
    ends it, too, if it changes the norm by less than `MIN_DECREASE`.
    linear: a linearisation near z for the first steps. progress: called before each step with its number, from 0, and the norm of
    the residual.
    """
    residual, damping = problem.residual(z), DAMPING
    normal = None if linear is None else _multiply_by_own_transpose(linear.jacobian)
    for step in range(steps):
        progress(step, float(residual.norm()))
        if fresh := linear is None or normal is None:
            linear = problem.linearise(z)
            normal = _multiply_by_own_transpose(linear.jacobian)
        _, pull = vjp(problem.residual, z)  # type: ignore[misc]
        slope = pull(residual)[0]
        move, iterations = _solve_step(linear.differentiate(z), slope, normal, damping * float(normal.diagonal().max()))
        moved = problem.residual(z + move)
        decrease = 1 - float(moved.norm() / residual.norm())
        if decrease > 0:
            z, residual, damping = z + move, moved, max(damping / CHANGE_OF_DAMPING, DAMPING)
        else:
            damping *= CHANGE_OF_DAMPING
        is_stuck = fresh and -MIN_DECREASE < decrease < MIN_NEW_DECREASE
        if is_stuck or (abs(decrease) < MIN_DECREASE and float(residual.norm()) <= enough):
            return Minimum(z, float(residual.norm()), step + 1, linear)
        if iterations == LINEAR_ITERATIONS or (decrease < MIN_DECREASE and not fresh):
            linear = None
    return Minimum(z, float(residual.norm()), steps, linear)


def project_out(basis: Tensor, residual: Tensor) -> Tensor:
    """Return the part of a residual (R,), or of each column of a Jacobian (R, D), that is orthogonal to a basis (R, E)."""
    basis = basis.to(residual)
    return residual - basis @ (basis.T @ residual)


def differentiate_along(function: Callable[[Any], Tensor], at: Any, direction: Any) -> Tensor:
    """Return the derivative of a function at `at` along a direction, tensors or equal nestings, in forward mode."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)  # by PyTorch's own formulas
        slope: Tensor = jvp(function, (at,), (direction,))[1]
    return slope


def _solve_step(derivative: Derivative, slope: Tensor, normal: Tensor, damping: float) -> tuple[Tensor, int]:
    """Return the step d (D,) with (J^T J + damping) d = -slope, and the number of iterations of conjugate gradients.

    normal: approximation of J^T J, (D, D). With its Cholesky factor L, the unknown of the iteration is L^T d.
    """
    factor = torch.linalg.cholesky(normal + damping * torch.eye(len(normal), dtype=normal.dtype, device=normal.device))

    def to_step(u: Tensor) -> Tensor:
        step: Tensor = torch.linalg.solve_triangular(factor.T, u[:, None], upper=True)
        return step[:, 0]

    def from_slope(slope: Tensor) -> Tensor:
        solved: Tensor = torch.linalg.solve_triangular(factor, slope[:, None], upper=False)
        return solved[:, 0]

    def curve(u: Tensor) -> Tensor:
        step = to_step(u[0])
        return from_slope(derivative.back(derivative.along(step)) + damping * step)[None]

    solution, iterations = conjugate_gradients(
        curve, -from_slope(slope)[None], iterations=LINEAR_ITERATIONS, tolerance=LINEAR_TOLERANCE
    )
    return to_step(solution[0]), iterations


def _multiply_by_own_transpose(jacobian: Tensor) -> Tensor:
    """Return J^T J in float64, (D, D), for J (R, D), without a copy of J in float64."""
    width = jacobian.shape[1]
    product = torch.zeros(width, width, dtype=torch.float64, device=jacobian.device)
    for part in torch.split(jacobian.detach(), ROWS_AT_ONCE):
        product.addmm_(part.double().T, part.double())
    return product
