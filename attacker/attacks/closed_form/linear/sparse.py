"""Recovery of whole batches from the zeros that ReLU causes in a gradient (SPEAR: Dimitrov et al. 2024, arXiv 2403.03945).

The gradient [dL/dW, dL/db] = D^T [X, 1] is factorised as L V with V a basis of its row span, so that D^T = L Q and
[X, 1] = Q^-1 V for an unknown square matrix Q. A neuron that is off for an example has a zero in that example's row of D.
Therefore each column of Q is a direction that is orthogonal to many rows of L. B - 1 independent rows that are all off for one
example determine its direction; SPEAR draws sets of rows at random until it finds such sets.

Here, sampling is guided. Rows of the gradient that are zero belong to neurons that are off for all examples. Together with the
known weights, they show where the examples lie, and so which other neurons are probably off.
"""

from typing import NamedTuple

from torch import Generator, Tensor

from attacker.attacks.closed_form.linear.directions import WRONG_SIDE_PENALTIES, DirectionPool
from attacker.attacks.closed_form.linear.low_rank import Factors
from attacker.attacks.closed_form.linear.sampling import SAMPLES_PER_BATCH, InformativeRows, sample_directions, score_likely_on
from attacker.attacks.closed_form.linear.zeros import find_pattern, measure_agreement

MIN_AGREEMENT = 0.98
"""Smallest `Directions.agreement` of an accepted example."""

STOP_AGREEMENT = 0.995
"""The search stops early once `Directions.agreement` of every example is at least this."""

LARGE_BATCH = 24
"""Batch size from which the number of samples decreases, so that giving up does not take longer."""

MAX_REPAIRED = 12
"""Largest number of directions with an agreement below STOP_AGREEMENT at which these are unmixed (`DirectionPool.unmix`)."""

MAX_EXCHANGES = 60
"""Number of exchanges of directions that are tried after each batch of samples."""


class Directions(NamedTuple):
    """The directions of the R examples of a batch.

    The direction of an example is the vector q (R,) for which `Factors.coordinates @ q` is the example's part of the gradient at
    the outputs of the M neurons, which is zero at those that ReLU turns off.
    q:         (R, R), one direction per column. Row i of its inverse is example i in the coordinates of the gradient's basis.
    agreement: (R,) share of neurons at which the gradient is zero along the direction and the example that follows from q turns
               the neuron off, or neither is the case. Neurons at which noise hides whether the gradient is zero are not counted.
               It is 0 for directions with too few zeros.
    samples:   number of sets of rows drawn at random, or of starts of `constant_modulus`; 0 if nothing was drawn.
    """

    q: Tensor
    agreement: Tensor
    samples: int


def search_directions(
    factors: Factors, forward: Tensor, rng: Generator, *, samples: int, constant: Tensor | None
) -> Directions | None:
    """Search for the directions of the R examples of a batch (see `Directions`); return None if fewer than R are found.

    Candidates are directions orthogonal to R - 1 rows of the gradient that are drawn at random, preferably rows of neurons that
    are off for the same example.
    forward:  (M, R), [W, b] in the coordinates of the span: forward @ p is the pre-activation of the example p @ basis.
    constant: (R,), the last column of the basis if the layer has a bias, else None; it determines scale and sign of each example.
    samples:  about the largest number of sets of rows drawn; large batches draw fewer. The search stops early if the agreement of
              every example is at least STOP_AGREEMENT.
    """
    space = InformativeRows.of(factors)
    if len(space.rows) < space.rank + 2:
        return None
    pool, best = DirectionPool(space, factors, forward), None
    rounds = max(1, int(samples * min(1.0, (LARGE_BATCH / space.rank) ** 2)) // SAMPLES_PER_BATCH)
    for done in range(1, rounds + 1):
        pool.add(sample_directions(space, score_likely_on(factors, forward, pool.find_on_neurons(), rng), rng))
        directions = _choose(pool, factors, forward, constant)
        if directions is None:
            continue
        if 0 < int((directions.agreement < STOP_AGREEMENT).sum()) <= MAX_REPAIRED:
            pool.unmix(directions.q, directions.agreement < STOP_AGREEMENT)
            directions = _choose(pool, factors, forward, constant) or directions
        if best is None or float(directions.agreement.sum()) >= float(best.agreement.sum()):
            best = directions._replace(samples=done * SAMPLES_PER_BATCH)
        if bool((best.agreement >= STOP_AGREEMENT).all()):
            break
    return best


def _choose(pool: DirectionPool, factors: Factors, forward: Tensor, constant: Tensor | None) -> Directions | None:
    """Choose the R directions of the pool that agree best with their own examples; return None if there are fewer.

    `DirectionPool.choose` gives one candidate set for each penalty in WRONG_SIDE_PENALTIES. In the best set, the directions that
    do not agree are exchanged for others of the pool if this increases the agreement, in at most MAX_EXCHANGES trials.
    """
    q = pool.convert_to_original(pool.q)
    pattern = find_pattern(q, factors)
    best: tuple[float, list[int], Tensor] | None = None
    for penalty in WRONG_SIDE_PENALTIES:
        chosen = pool.choose(penalty)
        if chosen is None:
            return None
        score = measure_agreement(q[:, chosen], pattern.select(chosen), forward, constant)
        if best is None or float(score.sum()) > best[0]:
            best = (float(score.sum()), chosen, score)
    assert best is not None
    total, chosen, score = best
    bad = (score < MIN_AGREEMENT).nonzero()[:, 0].tolist()
    spare = [i for i in range(len(pool.q)) if i not in chosen]
    for other, place in [(other, place) for other in spare for place in bad][:MAX_EXCHANGES]:
        trial = [other if k == place else i for k, i in enumerate(chosen)]
        new = measure_agreement(q[:, trial], pattern.select(trial), forward, constant)
        if float(new.sum()) > total + 1e-9:
            total, chosen, score = float(new.sum()), trial, new
    return Directions(q[:, chosen], score, 0)
