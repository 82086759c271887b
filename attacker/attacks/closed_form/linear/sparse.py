"""Whole batches from the zeros that ReLU leaves in a gradient (the idea of SPEAR: Dimitrov et al. 2024, arXiv 2403.03945).

The rows of [dL/dW, dL/db] = D^T [X, 1] are known as L V with V a basis of their span, so that D^T = L Q and [X, 1] = Q^-1 V for
an unknown square Q. A neuron that is off for an example has a zero in its column of D: each column of Q is a direction that is
orthogonal to many rows of L. B - 1 rows that are all off for one example give it away; the right choice of rows is found by
chance. Here chance is helped: rows that are zero are off for all examples, and because the weights are known, they tell in which
direction of the span the examples lie, and so which other rows are likely to be off. This multiplies the hits hundredfold.
"""

from typing import NamedTuple

from torch import Generator, Tensor

from attacker.attacks.closed_form.linear.directions import PENALTIES, DirectionPool
from attacker.attacks.closed_form.linear.low_rank import Factors
from attacker.attacks.closed_form.linear.sampling import BATCH, Space, likely_on, sampled
from attacker.attacks.closed_form.linear.zeros import agreement, pattern

ALIKE = 0.98
"""Smallest share of neurons whose zeros agree with those that the example itself causes."""

SURE = 0.995
"""The same share from which the search can stop."""

LARGE = 24
"""Batch size from which the number of samples decreases, so that giving up does not take longer."""

MENDED = 12
"""Largest number of disagreeing directions that are repaired one by one."""

TRIALS = 60
"""Number of exchanges of directions that are tried after each batch of samples."""


class Directions(NamedTuple):
    """q: (R, R), one direction a column. agreement: (R,) share of neurons that it is on for exactly where its example is.

    samples: how many were drawn.
    """

    q: Tensor
    agreement: Tensor
    samples: int


def search(factors: Factors, forward: Tensor, rng: Generator, *, samples: int, constant: Tensor | None) -> Directions | None:
    """Directions of the R examples of a batch; None where there are not enough sparse ones.

    forward:  (M, R), [W, b] in the coordinates of the span: forward @ p is the pre-activation of the example p @ basis.
    constant: (R,), the last column of the basis, where the layer has a bias: it fixes scale and sign of each example.
    samples:  after how many to give up. The search ends early where all neurons agree.
    """
    space = Space.of(factors)
    if len(space.rows) < space.rank + 2:
        return None
    pool, best = DirectionPool(space, factors, forward), None
    rounds = max(1, int(samples * min(1.0, (LARGE / space.rank) ** 2)) // BATCH)
    for done in range(1, rounds + 1):
        pool.add(sampled(space, likely_on(factors, forward, pool.on_for(), rng), rng))
        found = _judged(pool, factors, forward, constant)
        if found is None:
            continue
        if 0 < int((found.agreement < SURE).sum()) <= MENDED:
            pool.unmix(found.q, found.agreement < SURE)
            found = _judged(pool, factors, forward, constant) or found
        if best is None or float(found.agreement.sum()) >= float(best.agreement.sum()):
            best = found._replace(samples=done * BATCH)
        if bool((best.agreement >= SURE).all()):
            break
    return best


def _judged(pool: DirectionPool, factors: Factors, forward: Tensor, constant: Tensor | None) -> Directions | None:
    """The R directions of the pool that agree best with their own examples; None where there are not so many.

    Three choices of the first independent ones, in orders that trust zeros more or less; in the best of them, those that do not
    agree are exchanged as long as that helps.
    """
    q = pool.original(pool.q)
    seen = pattern(q, factors)
    best: tuple[float, list[int], Tensor] | None = None
    for penalty in PENALTIES:
        chosen = pool.chosen(penalty)
        if chosen is None:
            return None
        score = agreement(q[:, chosen], seen.of(chosen), forward, constant)
        if best is None or float(score.sum()) > best[0]:
            best = (float(score.sum()), chosen, score)
    assert best is not None
    total, chosen, score = best
    bad = (score < ALIKE).nonzero()[:, 0].tolist()
    spare = [i for i in range(len(pool.q)) if i not in chosen]
    for other, place in [(other, place) for other in spare for place in bad][:TRIALS]:
        trial = [other if k == place else i for k, i in enumerate(chosen)]
        new = agreement(q[:, trial], seen.of(trial), forward, constant)
        if float(new.sum()) > total + 1e-9:
            total, chosen, score = float(new.sum()), trial, new
    return Directions(q[:, chosen], score, 0)
