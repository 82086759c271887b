"""Route `peeled`: for a layer that lacks equations, solve for the network's input from all remaining equations and a prior.

    minimise over x in [0, 1]   ||residual of the equations||^2 + 2 lambda prior(x),    lambda decreasing to 0

by Gauss-Newton with conjugate gradients. The smoothness prior brings x close to the solution and is removed in the end. If the
layers below have more equations than the deficient layer lacks, and the signs of all their pre-activations are right, the input
is exact, as if no layer were deficient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.closed_form.peeling.assembly import alternating, compose, middle
from attacker.attacks.closed_form.peeling.equations import Composed, Tangent, each
from attacker.attacks.closed_form.peeling.smoothness import Curvature, Middle, SmoothnessPrior, TotalVariation
from attacker.attacks.closed_form.rgap.least_squares import Weighing
from attacker.attacks.closed_form.rgap.walk import Point, Tensors
from attacker.attacks.networks.chain import Chain

FALLEN = 0.7
"""Largest ratio of the residuals after and before a step at which another step is worthwhile."""


@dataclass(frozen=True, kw_only=True)
class Peeling:
    """How to peel.

    strongest, weakest: lambda at first, and before it is 0; at 1 the belief pulls as much as one equation a value of the input.
    levels, steps:  how many lambdas, each the same share of the one before, and Newton steps at each.
    certain:  lambda from which on the equations of layers below are used, as far as their slopes are certain.
    sure:     how many times its layer's last change a pre-activation must be from 0 for its slope to be certain.
    edge:     of the total variation, in units of [0, 1].
    inner, thorough: iterations of conjugate gradients in a step with belief, and in one without.
    last, patience:  steps without belief at most, and how many in a row may fail to make less of what is missed.
    rounding: share of the equations' right-hand sides that may be missed by an exact answer.
    noise:    how many times what is missed without belief is taken for noise, where it is more than rounding (Morozov 1966).
    """

    strongest: float = 5e-2
    weakest: float = 5e-6
    levels: int = 9
    steps: int = 2
    certain: float = 6e-3
    sure: float = 4.0
    edge: float = 0.01
    inner: int = 50
    thorough: int = 400
    last: int = 15
    patience: int = 4
    rounding: float = 5e-6
    noise: float = 1.5


PEELING = Peeling()


@dataclass(frozen=True)
class Peeled:
    """The answers to N problems.

    x:      (N, *inputs), as the network takes it.
    misfit: (N,) share of the right-hand sides that is missed, of all equations.
    weight: (N,) lambda of the belief in x; 0 where it was let go.
    free:   (N,) share of a random change of x that no equation sees, where the misfit is that of rounding; else no number.
    exact:  (N,) whether the equations alone give x, to rounding. Elsewhere the belief has shaped it.
    iterations: of conjugate gradients, for all N together.
    """

    x: Tensor
    misfit: Tensor
    weight: Tensor
    free: Tensor
    exact: Tensor
    iterations: int


def peel(
    chain: Chain, weights: Tensors, gradient: Tensors, point: Point, *, low: Tensor, high: Tensor, how: Peeling = PEELING
) -> Peeled:
    """The network's input, from a walk that stands behind the deficient layer `point.at`, the last one of several.

    weights: by name, (1 or N, ...); gradient: by name, (N, ...). low, high: the network's inputs for values of 0 and of 1, of
    shapes that broadcast to its inputs. Images (C, H, W) are believed to be smooth, rows to be near the middle.
    """
    problem = compose(chain, weights, gradient, point, low, high)
    return _Peeler(problem, TotalVariation(how.edge) if len(chain.inputs) == 3 else Middle(), how).run()


def never(x: Tensor) -> bool:
    return False


class _Peeler:
    """One call of `peel`; x is in [0, 1] here."""

    def __init__(self, problem: Composed, belief: SmoothnessPrior, how: Peeling) -> None:
        self.problem, self.belief, self.how = problem, belief, how
        self.path: list[tuple[float, Tensor]] = []
        self.iterations = 0

    def run(self) -> Peeled:
        x, misfit = self._settle(*self._anneal())
        settled = misfit <= self.how.rounding
        weight = torch.zeros_like(misfit)
        for share, earlier in self.path:  # of noise, the strongest belief that misses no more than it must
            enough = ~settled & (weight == 0) & (_top(self.problem, earlier) <= self.how.noise * _top(self.problem, x))
            x, weight = torch.where(each(enough, x), earlier, x), torch.where(enough, share, weight)
        free = torch.full_like(misfit, torch.nan)
        if bool(settled.any()):
            free[settled] = self._free(self.problem.of(settled.nonzero()[:, 0]), x[settled])
        return Peeled(
            x=self.problem.low + self.problem.span * x,
            misfit=_misfit(self.problem, x),
            weight=weight,
            free=free,
            exact=settled & (free <= _seen(self.problem)),
            iterations=self.iterations,
        )

    def _anneal(self) -> tuple[Tensor, Tangent]:
        """From grey to the weakest belief: x, and the equations at the level before."""
        how, x = self.how, middle(self.problem)
        edges = any(not layer.activation.smooth for layer in self.problem.below)
        tangent = before = self.problem.at(x, None if edges else self.problem.whole)
        for level in range(how.levels):
            share = how.strongest * (how.weakest / how.strongest) ** (level / max(1, how.levels - 1))
            if edges and share <= how.certain:
                tangent = self.problem.at(x, self._doubts(before, tangent))
            before = tangent
            for _ in range(how.steps):
                tangent = self._step(tangent, share)
            x = tangent.x
            self.path.append((share, x))
        return x, before

    def _step(self, tangent: Tangent, share: float) -> Tangent:
        """One Newton step, halved until it does not raise what is minimised."""
        d, worth = self._direction(tangent, share), self._worth(tangent, share)
        length = torch.ones_like(worth)
        for _ in range(8):
            ahead = self.problem.at(tangent.x + _along(length, d), tangent.weighing)
            worse = ~(self._worth(ahead, share) <= worth)
            if not bool(worse.any()):
                return ahead
            length = torch.where(worse, length / 2, length)
        return self.problem.at(tangent.x + _along(torch.where(worse, 0, length), d), tangent.weighing)

    def _worth(self, tangent: Tangent, share: float) -> Tensor:
        return tangent.missed.squared_norm() + 2 * share * self.belief.value(tangent.x)

    def _direction(self, tangent: Tangent, share: float) -> Tensor:
        if share == 0:
            return self._solve(_squared(tangent), tangent.adjoint(tangent.missed), self.how.thorough)
        seen, bend = _squared(tangent), self.belief.curvature(tangent.x)
        downhill = tangent.adjoint(tangent.missed) - share * self.belief.slope(tangent.x)
        return self._solve(lambda v: seen(v) + share * bend(v), downhill, self.how.inner)

    def _solve(self, curve: Curvature, target: Tensor, iterations: int, until: Callable[[Tensor], bool] = never) -> Tensor:
        x, done = conjugate_gradients(curve, target, iterations=iterations, until=until)
        self.iterations += done
        return x

    def _doubts(self, before: Tangent, now: Tangent) -> Weighing:
        return now.doubted([self.how.sure * _root_mean_square(a - b) for a, b in zip(before.z, now.z, strict=True)])

    def _settle(self, x: Tensor, before: Tangent) -> tuple[Tensor, Tensor]:
        """Without belief: solve, look which slopes are certain now, and again, until only rounding is missed. x, misfit."""
        how, problem = self.how, self.problem
        best, least = x.clone(), _top(problem, x)
        misfit = _misfit(problem, x)
        stalled, active = torch.zeros_like(least), torch.arange(len(x), device=x.device)
        for _ in range(how.last):
            weighing = self._doubts(before, problem.at(x))
            before = problem.at(x, weighing)
            x = x + self._direction(before, 0)
            top = _top(problem, x)
            fallen, better = top < FALLEN * least[active], top < least[active]
            stalled[active] = torch.where(fallen, 0, stalled[active] + 1)
            best[active[better]], least[active[better]] = x[better], top[better]
            misfit[active[better]] = _misfit(problem, x)[better]
            rows = (fallen | ((misfit[active] > how.rounding) & (stalled[active] < how.patience))).nonzero()[:, 0]
            if not len(rows):
                break
            active, x, problem, before = active[rows], x[rows], problem.of(rows), before.of(rows)
        return best, misfit

    def _free(self, problem: Composed, x: Tensor) -> Tensor:
        """(N,) what is left of a random change where the equations have explained their share."""
        curve, change = _squared(problem.at(x, problem.whole)), alternating(x)

        def left(seen: Tensor) -> Tensor:
            return _root_mean_square(change - seen)  # changes are of size 1

        enough = _seen(problem)
        most = 6 * self.how.thorough
        return left(self._solve(curve, curve(change), most, until=lambda seen: bool((left(seen) <= enough).all())))


def conjugate_gradients(
    curve: Curvature,
    target: Tensor,
    *,
    iterations: int,
    tolerance: float = 1e-8,
    until: Callable[[Tensor], bool] = never,
) -> tuple[Tensor, int]:
    """x with curve(x) = target, for each of N problems, and the iterations taken. What `curve` does not see stays 0.

    tolerance: of what is left, as a share of the target's length. until: of x, whether it will do; asked now and then.
    """
    x, left = torch.zeros_like(target), target
    direction, power = left, _power(left)
    enough, done = tolerance**2 * power, 0
    while done < iterations and bool((power > enough).any()):
        image = curve(direction)
        curvature = (direction * image).flatten(1).sum(dim=1)
        step = torch.where((power > enough) & (curvature > 0), power / curvature, 0)
        x, left = x + _along(step, direction), left - _along(step, image)
        before, power, done = power, torch.where(step > 0, _power(left), 0), done + 1
        if done % 50 == 0 and until(x):
            break
        direction = left + _along(torch.where(before > 0, power / before, 0), direction)
    return x, done


def _squared(tangent: Tangent) -> Curvature:
    return lambda v: tangent.adjoint(tangent.apply(v))


def _misfit(problem: Composed, x: Tensor) -> Tensor:
    missed, whole = problem.at(x, problem.whole).missed.squared_norm(), problem.sides.squared_norm()
    return (missed / whole.clamp(min=torch.finfo(whole.dtype).tiny)).sqrt().nan_to_num(nan=torch.inf)


def _top(problem: Composed, x: Tensor) -> Tensor:
    """(N,) what the deficient layer's own equations miss: unlike the rest, it has no jumps."""
    return problem.at(x).top.squared_norm().sqrt()


def _seen(problem: Composed) -> float:
    """A quarter of what one direction that no equation sees holds of a random change, on average."""
    return 0.25 / math.sqrt(math.prod(problem.layers[0].inputs))


def _root_mean_square(x: Tensor) -> Tensor:
    return x.flatten(1).square().mean(dim=1).sqrt()


def _power(x: Tensor) -> Tensor:
    return x.flatten(1).square().sum(dim=1)


def _along(share: Tensor, values: Tensor) -> Tensor:
    return each(share, values) * values
