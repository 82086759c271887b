"""Route `peeled`: the network's input from the equations of several layers together and a prior, if one layer has too few.

    minimise over x   ||residual of the equations||^2 + 2 lambda prior(x),    lambda decreasing to 0

by Gauss-Newton steps with conjugate gradients. x is in units in which data are in [0, 1], but is not confined to this range. The
prior (total variation of images, distance to 0.5 of rows) brings x close to the solution, and the last steps are without it. If
these last steps leave a residual, for example because of noise, the answer is usually the x found at a lambda above 0, see
MAX_NOISE_RATIO. The input is exact only if the equations of all these layers together determine it, and the signs of all
pre-activations before the deficient layer, the one with too few equations, are right.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.closed_form.peeling.assembly import build_grey_images, build_sign_pattern, compose
from attacker.attacks.closed_form.peeling.equations import ComposedEquations, Tangent
from attacker.attacks.closed_form.peeling.smoothness import MidpointPrior, SmoothnessPrior, TotalVariation
from attacker.attacks.closed_form.rgap.least_squares import ConstraintWeights
from attacker.attacks.closed_form.rgap.recursion import Point
from attacker.attacks.closed_form.rgap.system import broadcast_like
from attacker.attacks.networks.chain import Chain
from attacker.attacks.optimisers.conjugate_gradients import Curvature, conjugate_gradients, never_stop
from defenses.base import Tensors

MAX_PROGRESS_RATIO = 0.7
"""Largest ratio of the residuals after and before a step that counts as progress."""

LAMBDAS = [5e-2 * (5e-6 / 5e-2) ** (level / 8) for level in range(9)]
"""The weights lambda of the prior before it is set to 0."""

STEPS_PER_LAMBDA = 2

MAX_CERTAIN_LAMBDA = 6e-3
"""Largest lambda at which the equations of the layers before the deficient one are used, if one of these layers has a kink in its
activation. Without a kink, these equations are used at every lambda."""

MIN_SURE_RATIO = 4.0
"""The sign of a pre-activation is certain if its magnitude is at least this multiple of the root mean square by which the layer's
pre-activations last changed."""

EDGE = 0.01
"""See `TotalVariation`."""

ITERATIONS, FINAL_ITERATIONS = 50, 400
"""Largest number of iterations of conjugate gradients in each step with the prior, and in each step without it."""

MAX_FINAL_STEPS, MAX_STALLED_STEPS = 15, 4
"""Largest number of steps without the prior, and of successive ones without progress for a problem whose misfit exceeds
MAX_ROUNDING; for the others, one step without progress ends these steps."""

MAX_ROUNDING = 5e-6
"""Largest relative misfit of an exact answer, see `PeelingAnswers.misfit`."""

MAX_NOISE_RATIO = 1.5
"""If the misfit without the prior exceeds MAX_ROUNDING, the answer is the x of the largest lambda at which the residual of the
deficient layer's equations is at most this multiple of the residual without the prior (discrepancy principle, Morozov 1966). If
there is no such lambda, it is the x without the prior."""


@dataclass(frozen=True)
class PeelingAnswers:
    """The answers of `peel` to N problems (observations).

    x:      normalised inputs of the network, (N, *inputs).
    misfit: (N,) norm of the residual of all equations, relative to the norm of the right-hand sides.
    weight: (N,) weight lambda of the prior at which x was found; 0 if x is the best of the last steps, which are without the
            prior.
    free:   (N,) norm of the part of a random change of x that changes no equation, relative to the norm of the whole change;
            found by iterations that end early, so that it is too high rather than too low. NaN if the misfit exceeds
            MAX_ROUNDING.
    exact:  (N,) whether x fulfils the equations up to MAX_ROUNDING, and `free` is so small that they determine x.
            Otherwise, the prior may have influenced x.
    iterations: number of conjugate gradient iterations for the whole batch, the sum over all steps.
    """

    x: Tensor
    misfit: Tensor
    weight: Tensor
    free: Tensor
    exact: Tensor
    iterations: int


def peel(chain: Chain, weights: Tensors, gradient: Tensors, point: Point, *, low: Tensor, high: Tensor) -> PeelingAnswers:
    """Solve for the network's input, given R-GAP's solution `point` at the output of the deficient layer `point.at`.

    A layer is deficient if it has too few equations for its own input; of several, `point.at` must be the last.
    weights: by name, (1 or N, *shape). gradient: by name, (N, *shape). low, high: normalised inputs for values of 0 and of 1,
    which broadcast to the network's inputs. The prior is total variation for images (C, H, W), and else the squared distance to
    0.5.
    """
    problem = compose(chain, weights, gradient, point, low, high)
    return _Peeler(problem, TotalVariation(EDGE) if len(chain.inputs) == 3 else MidpointPrior()).run()


class _Peeler:
    """The state of one call of `peel`. Here x is in units in which data are in [0, 1], not normalised.

    path: the weights lambda of the prior so far, each with the x (N, *inputs) found for it.
    """

    def __init__(self, problem: ComposedEquations, belief: SmoothnessPrior) -> None:
        self.problem, self.belief = problem, belief
        self.path: list[tuple[float, Tensor]] = []
        self.iterations = 0

    def run(self) -> PeelingAnswers:
        x, misfit = self._settle(*self._anneal())
        settled = misfit <= MAX_ROUNDING
        weight = torch.zeros_like(misfit)
        for share, earlier_x in self.path:  # discrepancy principle
            is_fitting = (
                ~settled
                & (weight == 0)
                & (_measure_top_residual(self.problem, earlier_x) <= MAX_NOISE_RATIO * _measure_top_residual(self.problem, x))
            )
            x, weight = torch.where(broadcast_like(is_fitting, x), earlier_x, x), torch.where(is_fitting, share, weight)
        free = torch.full_like(misfit, torch.nan)
        if bool(settled.any()):
            free[settled] = self._measure_freedom(self.problem.select(settled.nonzero()[:, 0]), x[settled])
        return PeelingAnswers(
            x=self.problem.low + self.problem.span * x,
            misfit=_compute_misfit(self.problem, x),
            weight=weight,
            free=free,
            exact=settled & (free <= _compute_freedom_threshold(self.problem)),
            iterations=self.iterations,
        )

    def _anneal(self) -> tuple[Tensor, Tangent]:
        """Minimise from grey images with decreasing lambda; return the x of the last lambda and an earlier linearisation.

        The linearisation is at the x at which the last lambda started; how much pre-activations changed since shows which signs
        are uncertain.
        """
        x = build_grey_images(self.problem)
        edges = any(not layer.activation.smooth for layer in self.problem.below)
        tangent = previous = self.problem.linearise(x, None if edges else self.problem.whole)
        for share in LAMBDAS:
            if edges and share <= MAX_CERTAIN_LAMBDA:
                tangent = self.problem.linearise(x, self._suppress_doubtful(previous, tangent))
            previous = tangent
            for _ in range(STEPS_PER_LAMBDA):
                tangent = self._step(tangent, share)
            x = tangent.x
            self.path.append((share, x))
        return x, previous

    def _step(self, tangent: Tangent, share: float) -> Tangent:
        """Return the linearisation after one Gauss-Newton step of each problem.

        The first of the lengths 1, 1/2, ... 1/128 at which the objective is not larger than before is used; if there is none, x
        stays.
        share: the weight lambda of the prior.
        """
        d, worth = self._find_direction(tangent, share), self._compute_objective(tangent, share)
        length = torch.ones_like(worth)
        for _ in range(8):
            ahead = self.problem.linearise(tangent.x + _multiply_each(length, d), tangent.weighing)
            worse = ~(self._compute_objective(ahead, share) <= worth)
            if not bool(worse.any()):
                return ahead
            length = torch.where(worse, length / 2, length)
        return self.problem.linearise(tangent.x + _multiply_each(torch.where(worse, 0, length), d), tangent.weighing)

    def _compute_objective(self, tangent: Tangent, share: float) -> Tensor:
        return tangent.missed.squared_norm() + 2 * share * self.belief.value(tangent.x)

    def _find_direction(self, tangent: Tangent, share: float) -> Tensor:
        if share == 0:
            return self._solve(_build_normal_operator(tangent), tangent.adjoint(tangent.missed), FINAL_ITERATIONS)
        normal, curvature = _build_normal_operator(tangent), self.belief.curvature(tangent.x)
        downhill = tangent.adjoint(tangent.missed) - share * self.belief.gradient(tangent.x)
        return self._solve(lambda v: normal(v) + share * curvature(v), downhill, ITERATIONS)

    def _solve(self, curve: Curvature, target: Tensor, iterations: int, until: Callable[[Tensor], bool] = never_stop) -> Tensor:
        x, done = conjugate_gradients(curve, target, iterations=iterations, until=until)
        self.iterations += done
        return x

    def _suppress_doubtful(self, earlier: Tangent, now: Tangent) -> ConstraintWeights:
        return now.suppress_doubtful(
            [MIN_SURE_RATIO * _compute_root_mean_square(a - b) for a, b in zip(earlier.z, now.z, strict=True)]
        )

    def _settle(self, x: Tensor, earlier: Tangent) -> tuple[Tensor, Tensor]:
        """Make steps without the prior; return the x with the lowest residual of the deficient layer, and its misfit (N,).

        That residual is `_measure_top_residual`; a step makes progress if this residual falls below MAX_PROGRESS_RATIO of the
        lowest so far. See MAX_STALLED_STEPS for when a problem ends. Before each step, the weights of uncertain slopes are
        computed from the change of the pre-activations since `earlier`, the linearisation at an earlier x.
        """
        problem = self.problem
        best, minimum = x.clone(), _measure_top_residual(problem, x)
        misfit = _compute_misfit(problem, x)
        stalled, active = torch.zeros_like(minimum), torch.arange(len(x), device=x.device)
        for _ in range(MAX_FINAL_STEPS):
            weighing = self._suppress_doubtful(earlier, problem.linearise(x))
            earlier = problem.linearise(x, weighing)
            x = x + self._find_direction(earlier, 0)
            top = _measure_top_residual(problem, x)
            fallen, better = top < MAX_PROGRESS_RATIO * minimum[active], top < minimum[active]
            stalled[active] = torch.where(fallen, 0, stalled[active] + 1)
            best[active[better]], minimum[active[better]] = x[better], top[better]
            misfit[active[better]] = _compute_misfit(problem, x)[better]
            rows = (fallen | ((misfit[active] > MAX_ROUNDING) & (stalled[active] < MAX_STALLED_STEPS))).nonzero()[:, 0]
            if not len(rows):
                break
            active, x, problem, earlier = active[rows], x[rows], problem.select(rows), earlier.select(rows)
        return best, misfit

    def _measure_freedom(self, problem: ComposedEquations, x: Tensor) -> Tensor:
        """Return the norm (N,) of the part of a random change of x that changes no equation, relative to the whole change.

        The iterations end once this norm is at most the threshold for all problems, so that the result is an upper estimate.
        """
        curve, change = _build_normal_operator(problem.linearise(x, problem.whole)), build_sign_pattern(x)

        def measure_rest(result: Tensor) -> Tensor:
            return _compute_root_mean_square(change - result)  # the change has a root mean square of 1

        enough = _compute_freedom_threshold(problem)
        maximum = 6 * FINAL_ITERATIONS
        return measure_rest(
            self._solve(curve, curve(change), maximum, until=lambda seen: bool((measure_rest(seen) <= enough).all()))
        )


def _build_normal_operator(tangent: Tangent) -> Curvature:
    return lambda v: tangent.adjoint(tangent.apply(v))


def _compute_misfit(problem: ComposedEquations, x: Tensor) -> Tensor:
    missed, whole = problem.linearise(x, problem.whole).missed.squared_norm(), problem.sides.squared_norm()
    return (missed / whole.clamp(min=torch.finfo(whole.dtype).tiny)).sqrt().nan_to_num(nan=torch.inf)


def _measure_top_residual(problem: ComposedEquations, x: Tensor) -> Tensor:
    """Return the norm (N,) of the scaled residual of the deficient layer's own equations, which are continuous in x."""
    return problem.linearise(x).top.squared_norm().sqrt()


def _compute_freedom_threshold(problem: ComposedEquations) -> float:
    """Return a quarter of the root mean square that `PeelingAnswers.free` would have if one random direction were open."""
    return 0.25 / math.sqrt(math.prod(problem.layers[0].inputs))


def _compute_root_mean_square(x: Tensor) -> Tensor:
    return x.flatten(1).square().mean(dim=1).sqrt()


def _multiply_each(share: Tensor, values: Tensor) -> Tensor:
    return broadcast_like(share, values) * values
