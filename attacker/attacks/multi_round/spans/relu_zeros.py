"""Examples that the zeros of ReLU show in an update: lone rows, and the remaining examples of a batch.

Lone rows: if a single example x turns on a neuron, the neuron's row of the update is a multiple of [x, 1]. A row of a mixture of
examples has the same form. A row counts as one example's if another neuron has a parallel row, since two neurons rarely mix
examples in equal proportions, or if its values are those of an 8-bit image (Marchand et al. 2023, "SRATTA", recognise examples by
such knowledge about the data). Parallel rows are no evidence if the errors of all examples are multiples of each other, as in
tasks of two classes, where all neurons that are on for the same examples have parallel rows. Two examples that a confident
network takes for each other's class have such errors as well. Their mixture is a combination of examples that are also found, so
that parallel rows do not make such examples certain (`certainty.doubt_dependent`).

Remaining examples, beside known ones: the update of one step in the coordinates of its row space is C = D^T Z, with one row of Z
(rank, rank) and of D (rank, width) per example. Let Z_k be the rows of known examples, Z_u those of unknown ones, and N a basis
of the directions orthogonal to Z_k. Then C N = D_u^T (Z_u N) contains the unknown examples alone, up to multiples of known ones.
A neuron that is on for one unknown example only has a row parallel to its z_u N, which gives Z_u N and D_u. What is left, Z_u =
(Z_u N) N^T + G Z_k, has the multiples G of known examples, which follow from the neurons that are off for a known example, where
its row of D is zero.

Units of noise are those of `row_space`: the entries of a vector have noise of standard deviation 1.
"""

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.isolation import group_parallel_rows, select_independent
from attacker.attacks.closed_form.linear.low_rank import polish
from attacker.attacks.closed_form.linear.zeros import compute_zero_threshold
from attacker.attacks.confidence.eight_bit import LEVELS, is_eight_bit
from attacker.attacks.multi_round.spans.intersections import RecoveredExamples, mark_plausible
from attacker.attacks.multi_round.spans.layer_updates import LayerUpdates
from attacker.attacks.multi_round.spans.row_space import RowSpace, orthonormalise
from attacker.attacks.networks.chain import Chain
from fedsim.recording.observation import Observation

MAX_RESIDUAL = 3.0
"""Largest residual of an update that all examples of a batch explain, in standard deviations of its noise."""
ERROR_FACTOR = 10.0
"""Factor of the error that least squares estimates, since rounding errors within an update are not independent."""
MAX_UNKNOWN = 12
"""Largest number of unknown examples that are separated from each other by parallel rows."""
ZERO_LEVEL = 20.0
"""Size, in standard deviations of noise, up to which an entry of D counts as zero."""
MIN_LIVE_NEURONS = 8
"""Smallest number of live neurons per example of a batch from which zeros of ReLU make its examples certain. With three, 2 of 57
such answers were wrong on the report part, which chose this number."""
MIN_ZERO_SHARE = 0.05
"""Smallest share of neurons that must be off for an example, so that zeros are evidence of it (`separate_by_zeros`)."""
MIN_EQUATIONS = 3
"""Smallest number of neurons per unknown multiple of a known example."""
PARALLEL_CLEARANCE = 1e6
"""`RecoveredExamples.clearance` of examples that rest on parallel rows."""
MIN_GRID_CLEARANCE = 20.0
"""Smallest distance of two 8-bit values, in standard deviations of the noise of a row's values, at which they are compared."""


def has_independent_errors(observation: Observation, chain: Chain | None) -> bool:
    """Return whether parallel rows of a first layer's update are evidence of a single example.

    Parallel rows are evidence if the loss gradients of different examples at the layer's outputs have different directions. They
    are assumed to differ unless the network has at most two classes, or a layer of at most two neurons after the first one.
    chain: the network as a chain of layers; None if the network is not a chain, and then the number of classes alone decides.
    """
    narrow = chain is not None and any(layer.shape[0] <= 2 for layer in chain.layers[1:])
    return observation.data.num_classes > 2 and not narrow


def add_lone_rows(found: RecoveredExamples, updates: LayerUpdates, *, parallel: bool) -> RecoveredExamples:
    """Return the examples found so far, and those that alone turn on neurons in one of the updates, each example once.

    Only vectors that can be examples are added (`mark_plausible`). parallel: as for `find_lone_rows`.
    """
    images = updates.data.is_image
    rows = [find_lone_rows(space, *updates.limits, parallel=parallel, images=images) for space in updates.spaces if space.rank]
    if not rows:
        return found
    vectors, clearance = (torch.cat(each) for each in zip(*rows, strict=True))
    plausible = mark_plausible(vectors, updates.limits)
    return found.add(vectors[plausible], clearance[plausible], updates.spaces)


def find_lone_rows(space: RowSpace, low: Tensor, high: Tensor, *, parallel: bool, images: bool = True) -> tuple[Tensor, Tensor]:
    """Return vectors (n, F) in units of noise of examples that alone turn on neurons, and the clearance of each, (n,).

    One example may occur several times. Clearance says how certain an example is: infinite for 8-bit images, PARALLEL_CLEARANCE
    for those found by parallel rows.
    low, high: normalised inputs (F - 1,) of an example of all zeros, and of one of all ones.
    parallel: whether parallel rows count, see `has_independent_errors`. images: whether the data are images, whose values may
    have 8 bits.
    """
    stored = find_eight_bit_rows(space, low, high) if images else space.y[:0]
    several = find_parallel_rows(space) if parallel else stored[:0]
    clearance = stored.new_full((len(several) + len(stored),), torch.inf)
    clearance[: len(several)] = PARALLEL_CLEARANCE
    return torch.cat([several, stored]), clearance


def find_parallel_rows(space: RowSpace) -> Tensor:
    """Return vectors (n, F) in units of noise, one for each direction that at least two rows of the matrix of a space share.

    The result is empty if the space is saturated: there may then be more examples than dimensions, and parallel rows are no
    evidence of a single one.
    """
    if space.saturated:
        return space.y[:0]
    groups = group_parallel_rows(space.coordinates, space.noise, space.coordinates.norm(dim=1) > ZERO_LEVEL * space.noise)
    directions = groups.directions[groups.confirmed]
    lengths = space.y.norm(dim=1)
    error = (directions / lengths).norm(dim=1)
    scaled: Tensor = directions @ space.basis / (ERROR_FACTOR * error[:, None])
    return scaled


def find_eight_bit_rows(space: RowSpace, low: Tensor, high: Tensor) -> Tensor:
    """Return vectors (n, F) in units of noise of the rows that are multiples of [x, 1] of an 8-bit image x.

    The values of x are rounded to 8 bits. low, high: as for `find_lone_rows`.
    """
    rows = space.coordinates @ space.basis
    clear = rows[:, -1].abs() * float((high - low).abs().min()) > MIN_GRID_CLEARANCE * LEVELS * space.noise
    scale = rows[clear, -1:] / space.noise[clear, None]
    x = (rows[clear, :-1] / rows[clear, -1:] - low) / (high - low)
    stored = is_eight_bit(x)
    exact = low + (LEVELS * x[stored]).round() / LEVELS * (high - low)
    return scale[stored] * torch.cat([exact, torch.ones_like(scale[stored])], dim=1)


def add_separated(found: RecoveredExamples, updates: LayerUpdates) -> RecoveredExamples:
    """Return the examples found, together with those that follow from the zeros of ReLU in batches with few unknown examples.

    Batches with the fewest unknown examples come first. Every example that is found is then known in all other batches that
    contain it, and these batches are tried again. Batches with more than MAX_UNKNOWN unknown examples are not tried.
    """
    tried: dict[int, int] = {}
    while (separated := _separate_next(found, updates, tried)) is not None:
        found = found.add(*separated, updates.spaces)
    return found


def _separate_next(found: RecoveredExamples, updates: LayerUpdates, tried: dict[int, int]) -> tuple[Tensor, float] | None:
    """Return the new examples, as vectors [x, 1], of the first batch that yields some, and their clearance; None if none does.

    tried: dict from the index of a batch to the number of its examples that were known when it was last tried; it is updated, and
    a batch is tried again only if more of its examples are known now.
    """
    spaces, forwards = updates.spaces, updates.forwards
    known = {t: [i for i, holders in enumerate(found.holders) if t in holders] for t in forwards}
    waiting = sorted((spaces[t].rank - len(known[t]), t) for t in forwards if tried.get(t) != len(known[t]))
    for unknown, t in waiting:
        tried[t] = len(known[t])
        if 0 < unknown <= MAX_UNKNOWN:
            new = separate(spaces[t], forwards[t](), found.vectors[known[t]])
            if len(new) and bool(mark_plausible(new, updates.limits).all()):
                return new, _judge_zeros(spaces[t])
    return None


def _judge_zeros(space: RowSpace) -> float:
    """Return the clearance of examples found by zeros: infinite if MIN_LIVE_NEURONS * rank rows exceed their noise, else 0."""
    live = int((space.coordinates.norm(dim=1) > ZERO_LEVEL * space.noise).sum())
    return float("inf") if live >= MIN_LIVE_NEURONS * space.rank else 0.0


def separate(space: RowSpace, forward: Tensor, known: Tensor) -> Tensor:
    """Return vectors (n, F) of the unknown examples of a batch; n is the number of unknown examples, or 0 if separation fails.

    A vector is [x, 1], the flattened example with a 1 appended, times a factor, in units of the noise's standard deviation.
    space: row space of the update, of one SGD step on a layer with ReLU. forward: [W, b] (width, F) before the step. known: the
    vectors of examples of the batch that are known already, (k, F), fewer than the rank of the space.
    """
    basis, rank = space.basis, space.rank
    nothing, unknown = known.new_zeros(0, basis.shape[1]), rank - len(known)
    z = (known / known[:, -1:]) @ basis.T
    free = torch.linalg.svd(z)[2][len(known) :].T if len(known) else torch.eye(rank, dtype=z.dtype, device=z.device)
    inner = space.coordinates @ free
    live = inner.norm(dim=1) > ZERO_LEVEL * space.noise * unknown**0.5
    if int(live.sum()) < unknown + 2:
        return nothing
    directions = _find_directions(inner, space.noise, live)
    if len(directions) < unknown:
        return nothing
    d = inner @ torch.linalg.inv(directions)
    outer = directions @ free.T
    found = outer if not len(known) else outer + _fit_multiples(space, forward, known, z, d, outer) @ z
    return _fit_batch(space, forward, known, found)


def _find_directions(inner: Tensor, noise: Tensor, live: Tensor) -> Tensor:
    """Return independent directions (n, unknown) of rows to which only one unknown example contributes.

    Such rows are found as groups of parallel rows.

    inner: (width, unknown) part of each neuron's row that known examples do not explain. noise, live: (width,) standard deviation
           of each row's noise, and mask of the rows to use. n is smaller than `unknown` if some examples have no such rows.
    """
    if inner.shape[1] == 1:
        return inner.new_ones(1, 1)
    groups = group_parallel_rows(inner, noise, live)
    sure = groups.directions[groups.confirmed]
    return sure[select_independent(sure)][: inner.shape[1]]


def _fit_multiples(space: RowSpace, forward: Tensor, known: Tensor, z: Tensor, d: Tensor, outer: Tensor) -> Tensor:
    """Return the multiples G (unknown, k) of known examples in unknown ones, from neurons that are off for a known example.

    known: vectors (k, F). z: Z_k, known examples in coordinates of the row space, (k, rank). d: D_u^T, (width, unknown). outer:
    (Z_u N) N^T, (unknown, rank). A column of G is NaN if too few neurons are off for its known example.
    """
    rest = (space.coordinates - d @ outer) @ torch.linalg.pinv(z)
    off = (forward @ (known / known[:, -1:]).T) < 0
    weight = 1 / space.noise.clamp(min=torch.finfo(d.dtype).tiny)
    found = []
    for k in range(len(known)):
        rows = off[:, k] & (d.abs().amax(dim=1) > 0)
        if int(rows.sum()) < MIN_EQUATIONS * d.shape[1]:
            found.append(d.new_full((d.shape[1],), torch.nan))
            continue
        scale = weight[rows] / weight[rows].max()
        found.append(torch.linalg.lstsq(scale[:, None] * d[rows], scale * rest[rows, k]).solution)
    return torch.stack(found, dim=1)


def _fit_batch(space: RowSpace, forward: Tensor, known: Tensor, found: Tensor) -> Tensor:
    """Return the vectors (n, F) of found examples x, fitted together with the known ones to the whole update.

    A vector is [x, 1] times a factor that scales the estimated error of its entries to 1.
    found: in the coordinates of the row space, (n, rank). known: vectors (k, F).
    The result is empty, (0, F), unless each neuron's row of the update is explained by the examples that turn the neuron on.
    """
    basis, nothing = space.basis, known[:0]
    vectors = torch.cat([known, found @ basis])
    if not bool(torch.isfinite(vectors).all()) or not bool((vectors[:, -1] != 0).all()):
        return nothing
    vectors = vectors / vectors[:, -1:]
    live = space.coordinates.norm(dim=1) > ZERO_LEVEL * space.noise
    on = ((forward @ vectors.T) > 0)[live]
    noise = space.noise[live]
    d, z, residual = polish(space.coordinates[live], noise, on, vectors @ basis.T)
    if not residual <= MAX_RESIDUAL or not bool(torch.isfinite(z).all()):
        return nothing
    return z[len(known) :] @ basis / estimate_errors(d, noise)[len(known) :, None]


def estimate_errors(d: Tensor, noise: Tensor) -> Tensor:
    """Return the estimated standard deviation (B,) of the values of each example x in a least squares fit of rows by D x.

    d: D, (M, B). noise: (M,), standard deviation of the values of each row. The error is infinite if D has not full rank.
    """
    weighted = d / noise[:, None]
    inverse, failed = torch.linalg.inv_ex(weighted.T @ weighted)
    variance = inverse.diagonal().clamp(min=torch.finfo(d.dtype).tiny)
    error: Tensor = ERROR_FACTOR * variance.masked_fill(failed.bool(), torch.inf).sqrt()
    return error


def separate_by_zeros(space: RowSpace) -> Tensor:
    """Return vectors (n, F) of a client's examples x, found by rows (neurons) that only one example turns on.

    A vector is [x, 1] times a factor, of either sign, that scales the estimated error of its entries to 1.
    space: the client's parts of several sums, see `cohorts.split_sums`. The weights at which each local step was made are not
    known, so that the zeros are those of D itself. All examples or none are returned: n is the dimension of the span, or 0 if
    fewer directions were found, if hardly any neurons are off for one of the examples, or if examples in these directions do not
    explain all rows. A span of dimension 1 is a single example.
    """
    rank, nothing = space.rank, space.y[:0]
    if rank == 1:
        return space.y
    live = space.coordinates.norm(dim=1) > ZERO_LEVEL * space.noise * rank**0.5
    if int(live.sum()) < rank + 2:
        return nothing
    rows, noise = space.coordinates[live], space.noise[live]
    z = _find_directions(rows, noise, torch.ones(len(rows), dtype=torch.bool))
    if len(z) < rank:
        return nothing
    inverse = torch.linalg.inv(z)
    d = rows @ inverse
    level = torch.outer(noise, inverse.norm(dim=0))
    on = d.abs() > compute_zero_threshold(level, d.abs().median(dim=0).values)
    if float((~on).double().mean(dim=0).min()) < MIN_ZERO_SHARE:
        return nothing
    d, z, residual = polish(rows, noise, on, z)
    if not residual <= MAX_RESIDUAL or not bool(torch.isfinite(z).all()):
        return nothing
    return z @ orthonormalise(space.y) / estimate_errors(d, noise)[:, None]
