"""Recovery of the other examples of a batch of which some are known, such as 8-bit images that alone turn on a neuron.

As in `sparse`, the gradient is L V with D^T = L Q and [X, 1] = P V, where P is the inverse of Q. A known example p_k tells which
neurons it turns off. Its direction q_k, column k of Q, is orthogonal to the rows of L of these neurons, which determine q_k. Its
part of the gradient, L q_k p_k V, is then known as well. What is left when it is subtracted is the gradient of a smaller batch
behind the same neurons, in which directions are found more easily.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.isolation import select_independent
from attacker.attacks.closed_form.linear.low_rank import NOISE_LEVEL, Factors
from attacker.attacks.closed_form.linear.sparse import Directions
from attacker.attacks.closed_form.linear.zeros import MAX_KINK, find_pattern, measure_agreement

FindDirections = Callable[[Factors, Tensor, Tensor], Directions | None]
"""Maps a factorised gradient, [W, b] in the coordinates of its basis (M, R), and the last column of the basis (R,) to the
directions of all R examples; None if they are not found."""

MAX_ZERO_DEVIATION = 20.0
"""Largest root mean square, in standard deviations of noise, of the values along a known example's direction at the neurons that
it turns off. A mixture of examples has far larger ones."""
SPARE_ROWS = 4
"""Number of rows beyond the rank that must be off for a known example, so that they determine its direction."""


def find_remaining(factors: Factors, known: Tensor, forward: Tensor, constant: Tensor, find: FindDirections) -> Directions | None:
    """Return the directions of all R examples, of which some are known.

    Returns None if no known example determines its direction, or if the directions of the others are not found.

    known: (K, R), vectors [x, 1] up to a factor, in the coordinates of the basis; vectors of no single example are ignored.
    forward: (M, R), [W, b] in these coordinates. constant: (R,), the last column of the basis. find: function for the directions
    of the remaining examples, applied to the gradient from which the parts of the known ones were subtracted.
    """
    p, q = _solve_directions(factors, known[select_independent(known)] if len(known) else known, forward, constant)
    if not len(p):
        return None
    complement = torch.linalg.svd(q.T)[2][len(p) :].T  # orthonormal columns, orthogonal to all known directions
    others, samples = p[:0], 0
    if complement.shape[1]:
        remaining = find(_subtract(factors, p, q, complement), forward @ complement, complement.T @ constant)
        if remaining is None:
            return None
        inverse, failed = torch.linalg.inv_ex(remaining.q)
        if int(failed):
            return None
        others, samples = inverse @ complement.T, remaining.samples
    directions, failed = torch.linalg.inv_ex(torch.cat([p, others]))
    if int(failed) or not bool(torch.isfinite(directions).all()):
        return None
    return Directions(directions, measure_agreement(directions, find_pattern(directions, factors), forward, constant), samples)


def _solve_directions(factors: Factors, known: Tensor, forward: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
    """Return known examples p (K', R) and their directions q (R, K'), for which the matrix product p q is the identity.

    Each example is scaled so that the last entry of [x, 1] is 1. Known vectors are left out that turn off too few neurons, or
    for which the rows of the gradient at these neurons are orthogonal to no direction.
    """
    p = known / (known @ constant)[:, None]
    kept, directions = [], []
    for i, z in enumerate(p @ forward.T):
        off = factors.live & (z < -MAX_KINK * z.square().mean().sqrt())
        if int(off.sum()) < factors.rank + SPARE_ROWS:
            continue
        _, values, right = torch.linalg.svd(factors.coordinates[off] / factors.noise[off, None], full_matrices=False)
        size = p[i] @ right[-1]
        if float(values[-1]) <= MAX_ZERO_DEVIATION * int(off.sum()) ** 0.5 and float(size.abs()) > 0:
            kept.append(i)
            directions.append(right[-1] / size)
    p = p[kept]
    q = torch.stack(directions, dim=1) if directions else p.T
    inverse, failed = torch.linalg.inv_ex(p @ q)
    return (p[:0], q[:, :0]) if int(failed) else (p, q @ inverse)


def _subtract(factors: Factors, p: Tensor, q: Tensor, complement: Tensor) -> Factors:
    """Return a gradient without the parts of known examples p (K, R) with directions q (R, K), in the basis `complement`."""
    coordinates = (factors.coordinates - (factors.coordinates @ q) @ p) @ complement
    live = factors.live & (coordinates.norm(dim=1) > NOISE_LEVEL * factors.noise * complement.shape[1] ** 0.5)
    return factors._replace(coordinates=coordinates, basis=complement.T @ factors.basis, live=live)
