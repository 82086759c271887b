"""The Laplace approximation of the posterior of the examples given a gradient: how far the gradient determines the examples."""

from collections.abc import Callable
from math import inf
from time import perf_counter

import torch
from torch import Generator, Tensor
from torch.func import vjp

from attacker.attacks.optimisers.conjugate_gradients import conjugate_gradients

PRIOR_VARIANCE = 0.06
"""Prior variance of pixels in [0, 1], about the variance of photographs."""
CG_ITERATIONS, EARLY_CG_ITERATIONS = 12, 40
"""Number of iterations of conjugate gradients, each with a product with the Jacobian and one with its transpose; and the same
for searches that converged early. These explain the gradient by the directions that it determines best, and the others, which
they leave as they began, show only after more iterations: on tuning images behind LeNets of sigmoids, twelve gave wrong answers a
confidence of up to 0.67, and forty of at most 0.47; that of right answers falls by 0.03 to 0.27, and stays above 0.5."""
MAX_UNSEEN_INFLUENCE = 1e-6
"""Largest derivative that counts as zero, relative to the largest one of the example. It allows for rounding errors."""

Residuals = Callable[[Tensor], tuple[Tensor, ...]]
"""Maps examples (N, *shape) to the differences between their gradient and the observed one, one tensor per parameter.

The tensors are not concatenated: the derivative of each part would be a vector of all parameters, and adding these up would
dominate the time of deep networks.
"""


class Posterior:
    """A Gaussian posterior of the examples, with an answer x (N, *shape) as its mean.

    With J the Jacobian of the residuals at x, its covariance is (J^T J / variance + 1 / PRIOR_VARIANCE)^-1.
    residuals: function of x. variance: noise variance of each residual, 0-d. iterations: of conjugate gradients, at most.
    until: time on the clock `perf_counter` after which an iteration raises TimeoutError.
    """

    def __init__(
        self, residuals: Residuals, x: Tensor, variance: Tensor, iterations: int = CG_ITERATIONS, *, until: float = inf
    ) -> None:
        self.x, self.iterations, self.until = x, iterations, until
        self.share = variance / PRIOR_VARIANCE
        self.left, self.pull = vjp(residuals, x)[:2]
        # multiply by J through a double vjp, since forward mode takes a second to load, and warns
        self.push = vjp(lambda *u: vjp(residuals, x)[1](u)[0], *(torch.zeros_like(part) for part in self.left))[1]

    def estimate_error(self, rng: Generator) -> Tensor:
        """Estimate the mean posterior variance of each example, (N,), by one random vector (Hutchinson 1990)."""
        signs = (2 * torch.randint(2, self.x.shape, generator=rng) - 1).to(self.x)
        seen = self._solve(self.share * signs)
        return PRIOR_VARIANCE * (seen * signs).flatten(1).mean(dim=1).clamp(0, 1)

    def estimate_next_step(self) -> Tensor:
        """Estimate the mean squared change (N,) that another Gauss-Newton step, damped by the prior, would make."""
        return self._solve(-self.pull(self.left)[0]).flatten(1).square().mean(dim=1)

    def estimate_unseen_share(self, rng: Generator) -> Tensor:
        """Return the share of each example's values on which the residuals do not depend, (N,), by one random vector.

        A network does not depend on the pixels outside of a crop that its code makes, for example.
        """
        random = tuple(torch.randn(part.shape, generator=rng).to(part) for part in self.left)
        pulled: Tensor = self.pull(random)[0].flatten(1).abs()
        return (pulled <= MAX_UNSEEN_INFLUENCE * pulled.amax(dim=1, keepdim=True)).float().mean(dim=1)

    def _apply_curvature(self, v: Tensor) -> Tensor:
        """Return the product of v with the inverse of the covariance, times `variance`."""
        if perf_counter() > self.until:
            raise TimeoutError
        bent: Tensor = self.pull(self.push(v))[0]
        return bent + self.share * v

    def _solve(self, target: Tensor) -> Tensor:
        """Return the product of `target` (N, *shape) with the covariance, divided by `variance`, approximately.

        It is the solution v of `_apply_curvature(v) = target`, found by at most `iterations` conjugate gradient iterations.
        """
        solution, _ = conjugate_gradients(
            lambda v: self._apply_curvature(v[0])[None], target[None], iterations=self.iterations, tolerance=0.0
        )
        return solution[0]
