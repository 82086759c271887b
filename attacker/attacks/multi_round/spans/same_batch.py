"""Recovery of a whole batch that a client used in several rounds, from the zeros of ReLU in all of its updates.

The updates of rounds with the same examples have the same row space, so that intersections separate nothing. Their rows share the
unknown directions of the examples, however, and the network differs from round to round. An example that the known values of the
gradient show in one round (`closed_form.linear.constant_modulus`) need not be shown in the others, and its zeros in all rounds
then determine its direction. SPEAR and SPEAR++ (see `constant_modulus`) recover a batch from a single gradient.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

from attacker.attacks.closed_form.linear.constant_modulus import find_directions
from attacker.attacks.closed_form.linear.known_examples import find_remaining
from attacker.attacks.closed_form.linear.low_rank import NOISE_LEVEL, Factors, polish
from attacker.attacks.closed_form.linear.sparse import MIN_AGREEMENT, Directions, search_directions
from attacker.attacks.closed_form.linear.zeros import MAX_KINK, find_pattern
from attacker.attacks.multi_round.spans.intersections import RecoveredExamples, mark_plausible
from attacker.attacks.multi_round.spans.layer_updates import LayerUpdates
from attacker.attacks.multi_round.spans.relu_zeros import MAX_RESIDUAL, estimate_errors
from attacker.attacks.multi_round.spans.row_space import RowSpace

MAX_SAMPLES, MAX_SAMPLED_BATCH = 2**13, 40
"""Largest number of samples of the search without known values of the gradient, and largest batch in which it is tried."""
MIN_MODULUS_BATCH = 25
"""Smallest number of examples beside known ones that are not searched by samples first, as in `linear.whole_batch`."""
MAX_ALTERNATIONS = 4
"""Largest number of alternations between fitting zeros to examples and examples to zeros."""


def add_same_batches(
    found: RecoveredExamples, updates: LayerUpdates, shared: Tensor, get_templates: Callable[[int], Tensor | None], rng: Generator
) -> RecoveredExamples:
    """Return the examples found, together with those of batches that several rounds share as a whole.

    shared: as for `intersections.recover`. get_templates: returns the known values of the gradient (`build_templates`) for the
    update of a row space, given the space's index, or None.
    """
    spaces, forwards = updates.spaces, updates.forwards
    for group in group_same_batches(spaces, shared, list(forwards)):
        is_known = [group[0] in holders for holders in found.holders]
        if sum(is_known) >= spaces[group[0]].rank:
            continue
        values = [get_templates(t) for t in group]
        templates = [value for value in values if value is not None]
        new = _separate_same_batch(
            [spaces[t] for t in group],
            [forwards[t]() for t in group],
            templates if len(templates) == len(values) else None,
            rng,
            found.vectors[is_known],
        )
        if bool(mark_plausible(new, updates.limits).all()):
            found = found.add(new, torch.inf, spaces)
    return found


def group_same_batches(spaces: Sequence[RowSpace], shared: Tensor, rounds: Sequence[int]) -> list[list[int]]:
    """Return groups of at least two row spaces that are equal, as ascending lists of their indices in `spaces`.

    rounds: indices in `spaces` of the row spaces to be grouped. Spaces of rank 0 or of full rank are left out.
    shared: numbers of dimensions that spaces share, as `row_space.count_all_shared` returns them.
    """
    groups: list[list[int]] = []
    for t in sorted(rounds):
        if not spaces[t].rank or spaces[t].saturated:
            continue
        for group in groups:
            if all(int(shared[s, t]) == spaces[s].rank == spaces[t].rank for s in group):
                group.append(t)
                break
        else:
            groups.append([t])
    return [group for group in groups if len(group) > 1]


def _separate_same_batch(
    spaces: Sequence[RowSpace], forwards: Sequence[Tensor], templates: Sequence[Tensor] | None, rng: Generator, known: Tensor
) -> Tensor:
    """Return vectors (R, F) of all R examples of a batch from the row spaces of its rounds; none, (0, F), if that fails.

    A vector is [x, 1] times a factor, in units of the noise's standard deviation, as in `relu_zeros.separate`. Examples are
    returned only if, with the zeros that they cause, they explain the updates of all rounds up to noise.
    forwards: [W, b] (width, F) of each round.
    templates: for each round (K, width), the approximate gradient of one example's loss at the outputs of the hidden neurons that
    are on, for each of K labels. It is computed from the round's weights, see `constant_modulus.build_templates`. None if the
    network has not the form that this needs.
    known: (K, F), vectors of K examples of the batch that are known. If the directions of all examples are not found at once, the
    parts of the known examples are subtracted from the updates, and the directions of the other examples are looked for
    (`known_examples`).
    """
    factors = stack_spaces(spaces)
    forward = torch.cat(list(forwards)) @ factors.basis.T
    constant = factors.basis[:, -1]

    def find(factors: Factors, forward: Tensor, constant: Tensor) -> Directions | None:
        if templates is None:
            return sample(factors, forward, constant)
        values = torch.cat(list(templates), dim=1)
        found = find_directions(factors, values, forward, rng, constant=constant, gradients=len(spaces))
        return sample(factors, forward, constant) if found is None else found

    def sample(factors: Factors, forward: Tensor, constant: Tensor) -> Directions | None:
        few = factors.rank <= MAX_SAMPLED_BATCH
        return search_directions(factors, forward, rng, samples=MAX_SAMPLES, constant=constant) if few else None

    def find_others(factors: Factors, forward: Tensor, constant: Tensor) -> Directions | None:
        found = sample(factors, forward, constant) if factors.rank < MIN_MODULUS_BATCH else None
        sure = found is not None and bool((found.agreement >= MIN_AGREEMENT).all())
        return found if sure else find(factors, forward, constant)

    vectors = _fit_directions(find(factors, forward, constant), factors, forward)
    if len(vectors) or not len(known):
        return vectors
    beside = find_remaining(factors, known @ factors.basis.T, forward, constant, find_others)
    return _fit_directions(beside, factors, forward)


def _fit_directions(found: Directions | None, factors: Factors, forward: Tensor) -> Tensor:
    """Return vectors (R, F) of the examples with these directions, fitted to the updates; none, (0, F), if they do not fit.

    forward: (M, R), [W, b] of all rounds in the coordinates of the basis.
    """
    nothing, constant = factors.basis[:0], factors.basis[:, -1]
    p, failed = torch.linalg.inv_ex(found.q) if found is not None else (constant, torch.ones(()))
    if found is None or int(failed) or not bool(torch.isfinite(p).all()):
        return nothing
    seen = find_pattern(found.q, factors).on
    rows, noise = factors.coordinates[factors.live], factors.noise[factors.live]
    for _ in range(MAX_ALTERNATIONS):
        z = forward @ (p / (p @ constant)[:, None]).T
        near = z.abs() <= MAX_KINK * z.square().mean(dim=0).sqrt()  # the sign is rounding: as observed
        d, p, residual = polish(rows, noise, torch.where(near, seen, z > 0)[factors.live], p)
        if not bool(torch.isfinite(p).all()):
            return nothing
        if residual <= MAX_RESIDUAL:
            return p @ factors.basis / estimate_errors(d, noise)[:, None]
    return nothing


def stack_spaces(spaces: Sequence[RowSpace]) -> Factors:
    """Return the factorisation of the stacked rows of updates with equal row spaces, in a common basis."""
    rank = spaces[0].rank
    basis = torch.linalg.svd(torch.cat([space.y for space in spaces]), full_matrices=False)[2][:rank]
    coordinates = torch.cat([space.coordinates @ (space.basis @ basis.T) for space in spaces])
    return make_factors(coordinates, basis, torch.cat([space.noise for space in spaces]))


def make_factors(coordinates: Tensor, basis: Tensor, noise: Tensor) -> Factors:
    """Return the factorisation of rows with these coordinates (M, R) in an orthonormal basis (R, F), and noise (M,)."""
    level = noise.clamp(min=torch.finfo(basis.dtype).tiny)
    live = coordinates.norm(dim=1) > NOISE_LEVEL * level * len(basis) ** 0.5
    return Factors(coordinates, basis, level, live, float("inf"), saturated=False)
