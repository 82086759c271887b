"""Recovery of the remaining examples of a batch from the zeros that ReLU causes, once some of its examples are known.

The update of one step in the coordinates of its row space is C = D^T Z, with one row of Z (rank, rank) and of D (rank, width) per
example. Let Z_k be the rows of known examples, Z_u those of unknown ones, and N a basis of the directions orthogonal to Z_k. Then
C N = D_u^T (Z_u N) contains the unknown examples alone, up to multiples of known ones. A neuron that is on for one unknown
example only has a row parallel to its z_u N, which gives Z_u N and D_u. What is left, Z_u = (Z_u N) N^T + G Z_k, has the
multiples G of known examples, which follow from the neurons that are off for a known example, where its row of D is zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.isolation import group_parallel_rows, select_independent
from attacker.attacks.closed_form.linear.low_rank import polish
from attacker.attacks.multi_round.spans.row_space import RowSpace

MAX_RESIDUAL = 3.0
"""Largest residual of an update that all examples of a batch explain, in standard deviations of its noise."""
ERROR_FACTOR = 10.0
"""Factor of the error that least squares estimates, since rounding errors within an update are not independent."""
MAX_UNKNOWN = 12
"""Largest number of unknown examples that are separated from each other by parallel rows."""
ZERO_LEVEL = 20.0
"""Size, in standard deviations of noise, up to which an entry of D counts as zero."""
MIN_EQUATIONS = 3
"""Smallest number of neurons per unknown multiple of a known example."""


@dataclass(frozen=True)
class ReluBatch:
    """A batch behind one SGD step on a first layer with ReLU: its row space, and [W, b] (width, F) before the step."""

    space: RowSpace
    forward: Tensor


def separate(batch: ReluBatch, known: Tensor) -> Tensor:
    """Return vectors (n, F) of the unknown examples of a batch; n is the number of unknown examples, or 0 if separation fails.

    A vector is [x, 1], the flattened example with a 1 appended, times a factor, in units of the noise's standard deviation.
    Batches with more than MAX_UNKNOWN unknown examples are not separated.
    known: the vectors of examples of the batch that are known already, (k, F).
    """
    space, rank = batch.space, batch.space.rank
    nothing = known.new_zeros(0, space.y.shape[1])
    unknown = rank - len(known)
    if not 0 < unknown <= MAX_UNKNOWN:
        return nothing
    basis = space.basis
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
    found = outer if not len(known) else outer + _fit_multiples(batch, known, z, d, outer) @ z
    return _fit_batch(batch, known, found, basis)


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


def _fit_multiples(batch: ReluBatch, known: Tensor, z: Tensor, d: Tensor, outer: Tensor) -> Tensor:
    """Return the multiples G (unknown, k) of known examples in unknown ones, from neurons that are off for a known example.

    known: vectors (k, F). z: Z_k, known examples in coordinates of the row space, (k, rank). d: D_u^T, (width, unknown). outer:
    (Z_u N) N^T, (unknown, rank). A column of G is NaN if too few neurons are off for its known example.
    """
    space = batch.space
    rest = (space.coordinates - d @ outer) @ torch.linalg.pinv(z)
    off = (batch.forward @ (known / known[:, -1:]).T) < 0
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


def _fit_batch(batch: ReluBatch, known: Tensor, found: Tensor, basis: Tensor) -> Tensor:
    """Return the vectors (n, F) of found examples x, fitted together with the known ones to the whole update.

    A vector is [x, 1] times a factor that scales the estimated error of its entries to 1.
    found: in the coordinates of the row space, (n, rank). known: vectors (k, F). basis: unit rows of the row space, (rank, F).
    The result is empty, (0, F), unless each neuron's row of the update is explained by the examples that turn the neuron on.
    """
    space, nothing = batch.space, known.new_zeros(0, basis.shape[1])
    vectors = torch.cat([known, found @ basis])
    if not bool(torch.isfinite(vectors).all()) or not bool((vectors[:, -1] != 0).all()):
        return nothing
    vectors = vectors / vectors[:, -1:]
    live = space.coordinates.norm(dim=1) > ZERO_LEVEL * space.noise
    on = ((batch.forward @ vectors.T) > 0)[live]
    noise = space.noise[live]
    d, z, residual = polish(space.coordinates[live], noise, on, vectors @ basis.T)
    if not residual <= MAX_RESIDUAL or not bool(torch.isfinite(z).all()):
        return nothing
    weighted = d / noise[:, None]
    variance = torch.linalg.inv(weighted.T @ weighted).diagonal()[len(known) :]
    fitted = z[len(known) :] @ basis
    scaled: Tensor = fitted / (ERROR_FACTOR * variance.clamp(min=torch.finfo(z.dtype).tiny).sqrt()[:, None])
    return scaled
