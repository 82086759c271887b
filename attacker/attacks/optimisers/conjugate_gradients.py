"""Conjugate gradients for a batch of independent problems (Hestenes and Stiefel 1952)."""

from collections.abc import Callable

import torch
from torch import Tensor

Curvature = Callable[[Tensor], Tensor]
"""A symmetric positive semidefinite linear map of batches (N, *shape), such as a Hessian."""


def never_stop(x: Tensor) -> bool:
    return False


def conjugate_gradients(
    curve: Curvature, target: Tensor, *, iterations: int, tolerance: float = 1e-8, until: Callable[[Tensor], bool] = never_stop
) -> tuple[Tensor, int]:
    """Solve curve(x) = target for N problems by conjugate gradients; return x and the number of iterations.

    curve:      symmetric positive semidefinite linear map. target: (N, *shape), in the range of `curve`; of several solutions, x
                approximates the one of least norm.
    iterations: largest number. tolerance: residual relative to the norm of the target at which a problem has converged.
    until:      function of x that stops all problems if it returns True; it is called every 50 iterations.
    """
    x, left = torch.zeros_like(target), target
    direction, power = left, _dot(left, left)
    enough, done = tolerance**2 * power, 0
    while done < iterations and bool((power > enough).any()):
        image = curve(direction)
        curvature = _dot(direction, image)
        step = torch.where((power > enough) & (curvature > 0), power / curvature, 0)
        x, left = x + step * direction, left - step * image
        previous, power, done = power, torch.where(step > 0, _dot(left, left), 0), done + 1
        if done % 50 == 0 and until(x):
            break
        direction = left + torch.where(previous > 0, power / previous, 0) * direction
    return x, done


def _dot(first: Tensor, other: Tensor) -> Tensor:
    """Return the scalar products of each problem, (N, 1, ...), which broadcast over its values."""
    return (first * other).flatten(1).sum(dim=1).reshape(-1, *[1] * (first.ndim - 1))
