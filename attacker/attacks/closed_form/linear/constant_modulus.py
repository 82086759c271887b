"""Recovery of large batches behind two layers: directions along which the gradient is near one of two known values at a neuron.

As in `sparse`, the gradient is factorised as D^T [X, 1] = L V with D^T = L Q. The direction of an example is its column q of Q,
and L q is its column of D^T, with one value per hidden neuron. For a network with one hidden layer with ReLU, this value is the
neuron's entry of W_2^T r if the neuron is on, and zero if it is off. W_2 are the weights of the last layer, and r is the gradient
of the example's loss with respect to the logits. Before training, r is close to p - e_y, the mean prediction minus the label y.
The values of L q are therefore near 0 or near u = W_2^T (p - e_y), so that a = L q - u / 2 has about the known modulus |u| / 2 at
every neuron.

The mean squared difference of a^2 and u^2 / 4 is a polynomial of degree four, the criterion of constant-modulus equalisers
(Godard 1980). Gradient descent from random starts, for all labels at once, finds minima near the directions of examples with
label y. The neurons that are off then determine q up to rounding, as in `sparse`. A direction counts as exact if the gradient
along it is zero up to rounding at more neurons than the direction has entries; other directions are used only if there are too
few exact ones.

SPEAR (Dimitrov et al. 2024) draws sets of neurons at random, which takes a time that is exponential in the batch size. SPEAR++
(Bakarsky et al. 2025, arXiv 2510.24200) searches sparse directions by dictionary learning, without the known values.
"""

import torch
from torch import Generator, Tensor

from attacker.attacks.closed_form.linear.low_rank import Factors
from attacker.attacks.closed_form.linear.sparse import STOP_AGREEMENT, Directions
from attacker.attacks.closed_form.linear.whitened_problem import STARTS, Solutions, WhitenedProblem
from attacker.attacks.closed_form.linear.zeros import find_pattern, measure_agreement
from attacker.attacks.networks.chain import Chain
from defenses.base import Tensors

MAX_ROUNDS = 4
"""Largest number of rounds of starts, unless MIN_TURNS allows more."""
MIN_TURNS = 2
"""Number of rounds of starts in each gradient that are always allowed: with several gradients of the same examples, the largest
number of rounds is at least this times their number."""
REPAIRS = 4
"""Number of times that approximate directions are solved from their examples."""


def build_templates(chain: Chain, weights: Tensors, bounds: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """Return u, the approximate gradient at M hidden neurons that are on, for an example of each of K labels, (K, M).

    It is u = W_2^T (p - e_y), up to a factor for each label y, with the weights W_2 of the last layer and the prediction p for a
    grey example: the middle of `bounds`, the lowest and highest inputs, or 0 without bounds. Returns None unless the chain
    consists of two linear layers with only a ReLU between them. A single logit counts as K = 2 labels.
    """
    if len(chain.layers) != 2:
        return None
    first, last = chain.layers
    if last.kernel is not None or last.before or first.after or first.activation.name != "relu" or first.kernel is not None:
        return None
    inner, outer = weights[first.weight].double(), weights[last.weight].double()
    grey = inner.new_zeros(inner.shape[1]) if bounds is None else (bounds[0] + bounds[1]).double().flatten() / 2
    z = inner @ grey + (weights[first.bias].double() if first.bias else 0)
    logits = outer @ z.clamp(min=0) + (weights[last.bias].double() if last.bias else 0)
    if len(outer) == 1:
        return torch.cat([outer, -outer])
    return (logits.softmax(dim=0) - torch.eye(len(outer), dtype=outer.dtype, device=outer.device)) @ outer


def find_directions(
    factors: Factors, templates: Tensor, forward: Tensor, rng: Generator, *, constant: Tensor | None, gradients: int = 1
) -> Directions | None:
    """Return the directions of the R examples of a batch (see `Directions`), exact or approximate, or None if fewer are found.

    Along an example's direction, the gradient is near 0 at neurons that are off, and near a known value at those that are on.
    templates: these values u for each class (K, M), see `build_templates`. forward: (M, R), [W, b] in the coordinates of the
    basis.
    constant: (R,), the last column of the basis if the layer has a bias; else None.
    gradients: number of gradients of the same examples, at different weights, whose rows are stacked in equal parts in `factors`,
    `templates` and `forward`. The gradients share the directions and are searched in turn, each from the solutions of the
    gradients previous: an example whose part of one gradient is far from its template is often near its template in another.
    """
    problems = _list_problems(factors, templates, gradients)
    if not problems:
        return None
    best, problem, solutions = None, problems[0], Solutions.none(problems[0])
    for number in range(max(MAX_ROUNDS, MIN_TURNS * gradients)):
        previous, problem = problem, problems[number % len(problems)]
        solutions = solutions.move(previous, problem)
        solutions = solutions.join(problem.solve(problem.start(solutions.exact, rng)))
        q, exact = problem.convert_to_original(solutions.q), len(solutions.exact.q)
        if exact == len(solutions.q) == factors.rank - 1:  # they determine the last example, and it determines the last direction
            q = torch.cat([q, torch.linalg.svd(q)[0][:, -1:]], dim=1)
        if q.shape[1] < factors.rank:
            continue
        for _ in range(REPAIRS if exact < factors.rank else 0):
            q = _solve_from_examples(q, exact, factors, forward, constant)
        agreement = measure_agreement(q, find_pattern(q, factors), forward, constant)
        if best is None or float(agreement.sum()) > float(best.agreement.sum()):
            best = Directions(q, agreement, (number + 1) * STARTS)
        if bool((best.agreement >= STOP_AGREEMENT).all()):
            break
    return best


def _list_problems(factors: Factors, templates: Tensor, gradients: int) -> list[WhitenedProblem]:
    """Return one `WhitenedProblem` for each of the stacked gradients.

    Gradients are left out that have too few nonzero rows, rows of too low a rank, or no usable class. Of the remaining gradients,
    those are left out that have another number of usable classes than the first remaining one. A class is usable unless its
    template is 0 at every nonzero row.
    """
    blocks = zip(*(values.chunk(gradients) for values in (factors.coordinates, factors.noise, factors.live)), strict=True)
    built = [
        WhitenedProblem.of(factors._replace(coordinates=rows, noise=noise, live=live), u)
        for (rows, noise, live), u in zip(blocks, templates.chunk(gradients, dim=1), strict=True)
    ]
    problems = [problem for problem in built if problem is not None]
    return [problem for problem in problems if len(problem.u) == len(problems[0].u)]


def _solve_from_examples(q: Tensor, exact: int, factors: Factors, forward: Tensor, constant: Tensor | None) -> Tensor:
    """Return the directions q (R, R), one per column, of which all but the first `exact` are computed again.

    The recomputed directions are solved from the neurons that their examples turn off, if there are enough such neurons. The
    examples are the rows of the inverse of q. Each is orthogonal to the directions of all others, so that it hardly depends on
    its own direction. q is returned as it is if it is singular. forward, constant: as in `find_directions`.
    """
    p, info = torch.linalg.inv_ex(q)
    if int(info) or not bool(torch.isfinite(p).all()):
        return q
    z = forward @ p.T
    side = torch.sign(p @ constant) if constant is not None else torch.sign(z.sum(dim=0))
    columns = list(q.T[:exact])
    for i in range(exact, q.shape[1]):
        off = factors.live & (side[i] * z[:, i] <= 0)
        weighted = factors.coordinates[off] / factors.noise[off, None]
        columns.append(torch.linalg.svd(weighted)[2][-1] if len(weighted) >= len(q) - 1 else q[:, i])
    return torch.stack(columns, dim=1)
