"""How far a gradient determines the examples behind it: the Laplace approximation of their posterior at an answer."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.func import vjp

PRIOR_VARIANCE = 0.06
"""Variance of pixels in [0, 1] before any gradient is seen: about that of photographs."""
ITERATIONS = 12
"""Of conjugate gradients, each with one product with the Jacobian and one with its transpose."""

Residuals = Callable[[Tensor], Tensor]
"""From examples (N, *shape), how their gradient differs from the observed one, (M,)."""


class Posterior:
    """The Gaussian that an answer x (N, *shape) is taken to be the middle of.

    variance: of the noise of each residual, 0-d. With J the Jacobian of the residuals at x, and `PRIOR_VARIANCE` of pixels, its
    covariance is (J^T J / variance + 1 / PRIOR_VARIANCE)^-1.
    """

    def __init__(self, residuals: Residuals, x: Tensor, variance: Tensor, iterations: int = ITERATIONS) -> None:
        self.x, self.iterations = x, iterations
        self.share = variance / PRIOR_VARIANCE
        self.left, self.pull = vjp(residuals, x)[:2]
        # forward mode, the other way to a product with J, loads decompositions that warn and take a second
        self.push = vjp(lambda u: vjp(residuals, x)[1](u)[0], torch.zeros_like(self.left))[1]

    def expected_error(self, rng: Generator) -> Tensor:
        """Return the mean variance of each example, (N,), estimated with one random vector of signs (Hutchinson 1990)."""
        signs = (2 * torch.randint(2, self.x.shape, generator=rng) - 1).to(self.x)
        seen = self._solve(self.share * signs)
        return PRIOR_VARIANCE * (seen * signs).flatten(1).mean(dim=1).clamp(0, 1)

    def next_step(self) -> Tensor:
        """Return the mean square, (N,), of what one more step of Gauss-Newton would change of each example."""
        return self._solve(-self.pull(self.left)[0]).flatten(1).square().mean(dim=1)

    def _curve(self, v: Tensor) -> Tensor:
        bent: Tensor = self.pull(self.push(v)[0])[0]
        return bent + self.share * v

    def _solve(self, target: Tensor) -> Tensor:
        """Return v whose curve is `target`, as far as conjugate gradients come."""
        v, left = torch.zeros_like(target), target
        direction, power = left, left.square().sum()
        for _ in range(self.iterations):
            image = self._curve(direction)
            curvature = (direction * image).sum()
            if not bool(curvature > 0) or not bool(power > 0):
                break
            step = power / curvature
            v, left = v + step * direction, left - step * image
            before, power = power, left.square().sum()
            direction = left + power / before * direction
        return v
