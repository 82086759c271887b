"""Images of spans that closed forms do not open, separated by independent component analysis (ICA).

The span of images x is the set of all linear combinations of their vectors [x, 1]. ICA estimates the images in it, as in the
Cocktail Party attack, without network, labels or local steps, and behind noise as well. Where the rows of updates are
combinations of these images only, the zeros that ReLU causes in the rows turn estimates into exact images. An image counts as
exact only if its values are those of an 8-bit image. Estimates are returned as examples too, with the confidence NaN (undecided).

The same image may be in several spans. Its copies are recognised by the differences between neighbouring pixels, which hardly
correlate between different images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor
from torch.nn import functional

from attacker.attacks.closed_form.cocktail.components import separate, whiten
from attacker.attacks.closed_form.cocktail.mixtures import differentiate_images, scale_images
from attacker.attacks.closed_form.linear.low_rank import Factors, polish
from attacker.attacks.closed_form.linear.refinement import refine_directions
from attacker.attacks.closed_form.linear.zeros import find_pattern
from attacker.attacks.confidence.eight_bit import is_eight_bit
from attacker.attacks.multi_round.spans.certainty import MAX_CERTAIN_ERROR
from attacker.attacks.multi_round.spans.intersections import RecoveredExamples
from attacker.attacks.multi_round.spans.layer_updates import LayerUpdates, convert_to_examples
from attacker.attacks.multi_round.spans.relu_zeros import MAX_RESIDUAL, estimate_errors
from attacker.attacks.multi_round.spans.row_space import intersect, orthonormalise
from attacker.attacks.multi_round.spans.same_batch import make_factors, stack_spaces
from fedsim.recording.observation import DataSpec

MAX_COMPONENTS = 64
"""Largest dimension of a span that is separated. Of 128 images of 32x32 pixels most are not recognisable (benchmarks/batches.py
cocktail)."""
MIN_VALUES = 16
"""Smallest number of values of an image per dimension of a span."""
MIN_CORRELATION = 0.5
"""Smallest correlation of the pixel differences of two copies of an image."""
MIN_SAME_CORRELATION = 0.9
"""Smallest correlation of pixel differences for two decisions: an image that is refined by zeros of ReLU replaces the estimate
that it began with, and an estimate is left out because it equals a found example that may be a mixture."""
MAX_PASSES = 3
"""Largest number of refinements of a span, each of which starts from the exact images of the one before."""


@dataclass(frozen=True)
class MixedImages:
    """The span of the vectors [x, 1] of images, as an orthonormal basis (R, F).

    holders: indices of the updates whose row spaces contain the span. factors: rows of updates that are combinations of these
    images only, in this basis; None if there are none. forward: (M, R), the [W, b] that was sent for the neuron of each of these
    rows, in this basis; empty without `factors`.
    """

    basis: Tensor
    holders: tuple[int, ...]
    factors: Factors | None
    forward: Tensor


class EstimatedImages(NamedTuple):
    """Estimated images as vectors [x, 1] (N, F), and for each the indices of the updates that contain it."""

    vectors: Tensor
    holders: tuple[tuple[int, ...], ...]


@dataclass
class _Copies:
    """Copies [x, 1] (F,) of one image from spans of `rank` dimensions, and the updates that contain these and larger spans."""

    rank: int
    vectors: list[Tensor]
    holders: set[int] = field(default_factory=set)


def is_separable(rank: int, data: DataSpec) -> bool:
    """Return whether ICA can separate a span of `rank` dimensions: of images that are few enough, and large enough."""
    return data.is_image and min(data.shape[1:]) > 1 and 0 < rank <= min(MAX_COMPONENTS, data.size // MIN_VALUES)


def mix_images(factors: Factors, holders: Sequence[int], forward: Tensor | None) -> MixedImages:
    """Return the span of the basis. forward: (M, F), the [W, b] of each row of `factors`; None to use no rows."""
    if forward is None:
        return MixedImages(factors.basis, tuple(holders), None, factors.basis[:0])
    return MixedImages(factors.basis, tuple(holders), factors, forward @ factors.basis.T)


def span_vectors(y: Tensor) -> Factors:
    """Return the span of independent vectors y (R, F) as a factorisation without rows."""
    basis = orthonormalise(y)
    return make_factors(basis.new_zeros(0, len(basis)), basis, basis.new_zeros(0))


def list_mixed_batches(found: RecoveredExamples, updates: LayerUpdates, shared: Tensor) -> list[MixedImages]:
    """Return the spans of batches of which some images are not known, and their intersections of at least two dimensions.

    Spans that independent component analysis cannot separate (`is_separable`) are left out, and those of row spaces that are not
    whole (`RowSpace.is_whole`).
    shared: from `count_all_shared`. The rows of updates without an entry in `LayerUpdates.forwards` are not used.
    """
    spaces, forwards, data = updates.spaces, updates.forwards, updates.data
    known, held = find_known(found).tolist(), torch.zeros(len(spaces), len(found.vectors), dtype=torch.long)
    for i, holders in enumerate(found.holders):
        held[list(holders), i] = int(known[i])
    missing = shared - held @ held.T
    wanted = [t for t, space in enumerate(spaces) if missing[t, t] > 0 and space.is_whole]
    mixed = []
    for t in wanted:
        if is_separable(spaces[t].rank, data):
            mixed.append(mix_images(stack_spaces([spaces[t]]), (t,), forwards[t]() if t in forwards else None))
        for other in ((shared[t] > 1) & (missing[t] > 0)).nonzero()[:, 0].tolist():
            if other <= t or not spaces[other].is_whole or not is_separable(int(shared[t, other]), data):
                continue
            common = intersect(spaces[t].y, spaces[other].y).y
            if len(common):
                mixed.append(mix_images(span_vectors(common), (t, other), None))
    return mixed


def find_known(found: RecoveredExamples) -> Tensor:
    """Return a mask (N,) of the examples that are taken to be known: no mixtures (positive clearance), and precise."""
    return (found.clearance > 0) & (found.error <= MAX_CERTAIN_ERROR)


def add_components(
    found: RecoveredExamples, mixed: Sequence[MixedImages], updates: LayerUpdates, rng: Generator
) -> tuple[RecoveredExamples, EstimatedImages]:
    """Return the examples found and exact images that ICA and zeros of ReLU show in spans, and estimates of other images.

    mixed: spans; small ones come first, and a span is skipped if its images are known (`find_known`) or estimated already.
    Of an image in several spans of one size, the estimate is the median.
    """
    spaces, data = updates.spaces, updates.data
    groups: list[_Copies] = []
    for span in sorted(mixed, key=lambda span: len(span.basis)):
        rank = len(span.basis)
        known = _select_known(found, span.holders)
        smaller = [group for group in groups if group.rank < rank and set(span.holders) <= group.holders]
        if len(known) + len(smaller) >= rank:
            continue
        exact, estimated = separate_images(span, known, data, rng)
        found = found.add(exact, torch.inf, spaces)
        _add_copies(groups, estimated, span, data)
    nothing = spaces[0].y.new_zeros(0, spaces[0].y.shape[1])
    first = torch.stack([group.vectors[0] for group in groups]) if groups else nothing
    minimum = torch.where(find_known(found), MIN_CORRELATION, MIN_SAME_CORRELATION)
    new = (correlate(first, found.vectors, data) < minimum).all(dim=1).tolist()
    chosen = [group for group, is_new in zip(groups, new, strict=True) if is_new]
    vectors = torch.stack([torch.stack(group.vectors).quantile(0.5, dim=0) for group in chosen]) if chosen else nothing
    return found, EstimatedImages(vectors, tuple(tuple(sorted(group.holders)) for group in chosen))


def append_estimates(found: RecoveredExamples, estimates: EstimatedImages) -> RecoveredExamples:
    """Return the precise examples found, then the estimates, whose clearance is 0, then the other examples found.

    The order is the ranking of answers that the attack is undecided about. Behind noise, the other examples are often mixtures.
    """
    count = len(estimates.vectors)
    late = torch.cat([2 * (found.error > MAX_CERTAIN_ERROR).long(), torch.ones(count, dtype=torch.long)])
    order = late.argsort(stable=True)
    holders = (*found.holders, *estimates.holders)
    return RecoveredExamples(
        torch.cat([found.vectors, estimates.vectors])[order],
        torch.cat([found.clearance, found.clearance.new_zeros(count)])[order],
        tuple(holders[i] for i in order.tolist()),
    )


def separate_images(span: MixedImages, known: Tensor, data: DataSpec, rng: Generator) -> tuple[Tensor, Tensor]:
    """Return exact images of a span that are not known yet, (n, F), and estimates [x, 1] of the others, (m, F).

    Exact ones are vectors [x, 1] times a factor, of either sign, in units of noise. n + m is at most the dimension of the span
    less the number of known vectors (k, F).
    """
    whitening, mixtures = whiten(differentiate_images(span.basis[:, :-1], data), len(span.basis))
    estimated = separate(mixtures, rng).matrix.double() @ whitening @ span.basis
    exact = known[:0]
    for _ in range(MAX_PASSES if span.factors is not None else 0):
        start, inserted = _insert(estimated, torch.cat([known, exact]), data)
        refined, is_exact = _refine(span, start, data)
        kept = correlate(refined, estimated, data).diagonal() >= MIN_SAME_CORRELATION
        estimated = torch.where(kept[:, None], refined, estimated)
        fresh = refined[is_exact & ~inserted]
        if not len(fresh):
            break
        exact = torch.cat([exact, fresh])
    sure = torch.cat([known, exact])
    free = (~_insert(estimated, sure, data)[1]).nonzero()[:, 0][: max(0, len(span.basis) - len(sure))]
    x = data.normalise(scale_images(estimated[free], data).clamp(0, 1)).flatten(1)
    return exact, torch.cat([x, x.new_ones(len(x), 1)], dim=1)


def correlate(images: Tensor, others: Tensor, data: DataSpec) -> Tensor:
    """Return the magnitudes (N, M) of the correlations between pixel differences of images, given as vectors (N, F), (M, F)."""
    if not len(images) or not len(others):
        return images.new_zeros(len(images), len(others))
    unit = functional.normalize(torch.cat([images, others]), dim=1)
    made = functional.normalize(differentiate_images(unit[:, :-1], data), dim=1)
    found: Tensor = (made[: len(images)] @ made[len(images) :].T).abs()
    return found


def _match(images: Tensor, others: Tensor, data: DataSpec) -> list[tuple[int, int]]:
    """Return pairs of indices of vectors of the same image, each index at most once, with the largest sum of correlations."""
    correlation = correlate(images, others, data)
    pairs = zip(*(index.tolist() for index in linear_sum_assignment(-correlation.numpy())), strict=True)
    return [(i, j) for i, j in pairs if correlation[i, j] >= MIN_CORRELATION]


def _insert(estimated: Tensor, sure: Tensor, data: DataSpec) -> tuple[Tensor, Tensor]:
    """Return estimates (R, F) with exact vectors in place of estimates of the same images, and a mask (R,) of the exact ones."""
    start, inserted = estimated.clone(), torch.zeros(len(estimated), dtype=torch.bool)
    for i, j in _match(estimated, sure, data):
        start[i], inserted[i] = sure[j], True
    return start, inserted


def _refine(span: MixedImages, start: Tensor, data: DataSpec) -> tuple[Tensor, Tensor]:
    """Return images (R, F) that cause zeros of ReLU, near the vectors `start`, and a mask (R,) of those that are exact.

    The images are vectors [x, 1] times a factor that scales the estimated error of exact ones to 1. If no set of images with
    such zeros is found, `start` is returned, and no image is exact. If a set is found but does not fit the rows, its vectors
    are returned without this factor, and no image is exact.
    """
    factors, basis, nothing = span.factors, span.basis, torch.zeros(len(start), dtype=torch.bool)
    assert factors is not None
    unit = functional.normalize(start, dim=1)
    found = refine_directions(factors, unit @ basis.T, span.forward, basis[:, -1])
    p, failed = (start, torch.ones(())) if found is None else torch.linalg.inv_ex(found.directions.q)
    if found is None or int(failed) or not bool(torch.isfinite(p).all()):
        return start, nothing
    live, on = factors.live, find_pattern(found.directions.q, factors).on
    d, fitted, residual = polish(factors.coordinates[live], factors.noise[live], on[live], p)
    if not residual <= MAX_RESIDUAL or not bool(torch.isfinite(fitted).all()):
        return p @ basis, nothing
    vectors = fitted @ basis / estimate_errors(d, factors.noise[live])[:, None]
    precise = vectors[:, -1].abs() * MAX_CERTAIN_ERROR >= 1
    return vectors, precise & is_eight_bit(convert_to_examples(vectors, data))


def _add_copies(groups: list[_Copies], vectors: Tensor, span: MixedImages, data: DataSpec) -> None:
    """Add estimates [x, 1] (m, F) of the images of a span to the groups of copies, each to one group or as a new one.

    Copies from a span that is larger than the span of an image's first copy only tell which updates contain the image.
    """
    first = torch.stack([group.vectors[0] for group in groups]) if groups else vectors[:0]
    places = dict(_match(vectors, first, data))
    for i, vector in enumerate(vectors):
        group = groups[places[i]] if i in places else _Copies(len(span.basis), [])
        if i not in places:
            groups.append(group)
        if group.rank == len(span.basis):
            group.vectors.append(vector)
        group.holders.update(span.holders)


def _select_known(found: RecoveredExamples, holders: Sequence[int]) -> Tensor:
    """Return the vectors (k, F) of known examples (`find_known`) that all updates `holders` contain."""
    known = find_known(found).tolist()
    return found.vectors[[i for i, places in enumerate(found.holders) if known[i] and set(holders) <= set(places)]]
