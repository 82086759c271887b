"""The inputs of all examples of a batch, from the directions along which ReLU makes the gradient zero at many neurons."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from attacker.attacks.closed_form.linear.constant_modulus import find_directions
from attacker.attacks.closed_form.linear.isolation import (
    Groups,
    group_parallel_rows,
    mark_mixtures,
    recover_groups,
    select_independent,
)
from attacker.attacks.closed_form.linear.known_examples import find_remaining
from attacker.attacks.closed_form.linear.layer_gradient import (
    UNSCALED,
    LayerGradient,
    LinearAnswer,
    build_empty_answer,
    join_notes,
)
from attacker.attacks.closed_form.linear.low_rank import Factors, polish
from attacker.attacks.closed_form.linear.single_example import SINGLE_NEURON_CERTAINTY
from attacker.attacks.closed_form.linear.sparse import MIN_AGREEMENT, Directions, search_directions
from attacker.attacks.closed_form.linear.zeros import find_pattern, match_kinks, measure_agreement

MIN_MODULUS_BATCH, MAX_SAMPLED_BATCH = 25, 40
"""Smallest batch in which directions are searched by known values of the gradient (`constant_modulus`) first, and largest one in
which sampling is tried if that fails. In larger batches a sample hardly ever holds only neurons that are off for one example."""

MAX_ALTERNATIONS = 6
"""Number of alternations between fitting zeros to examples and examples to zeros."""

MAX_RESIDUAL = 3.0
"""Largest residual of an explained gradient, in standard deviations of its noise."""


@dataclass(frozen=True, kw_only=True)
class DirectionSearch:
    """A search for the directions of all R examples of a batch (see `Directions`).

    Batches below MIN_MODULUS_BATCH, and networks without templates (known values that the gradient takes), are searched by
    sampling (`sparse`). Others are searched by the templates, and by sampling if that fails, up to MAX_SAMPLED_BATCH.
    samples: largest number of samples.
    """

    templates: Tensor | None
    rng: Generator
    samples: int

    def __call__(self, factors: Factors, forward: Tensor, constant: Tensor | None) -> Directions | None:
        """Return the directions, or None if fewer are found.

        forward: (M, R), the layer's [W, b] in the coordinates of the basis. constant: (R,), the last column of the basis if the
        layer has a bias; else None.
        """
        if self.templates is not None and factors.rank >= MIN_MODULUS_BATCH:
            directions = find_directions(factors, self.templates, forward, self.rng, constant=constant)
            if directions is not None or factors.rank > MAX_SAMPLED_BATCH:
                return directions
        return search_directions(factors, forward, self.rng, samples=self.samples, constant=constant)


def recover_batch(gradient: LayerGradient, factors: Factors, examples: int | None, find: DirectionSearch) -> LinearAnswer:
    """Recover all examples of a batch, from isolated neurons if each example has some, otherwise from sparse directions.

    If neither succeeds, return the examples that could be recovered.
    """
    forward, constant = gradient.weight @ factors.basis.T, factors.basis[:, -1] if gradient.biased else None
    groups = group_parallel_rows(factors.coordinates, factors.noise, factors.live)
    groups = mark_mixtures(gradient, groups, groups.directions @ factors.basis)
    directions = _combine_groups(groups, factors, forward, constant)
    if directions is not None and bool((directions.agreement >= MIN_AGREEMENT).all()):
        return _recover_all(gradient, factors, directions, examples, "isolated")
    directions = find(factors, forward, constant)
    whole = None if directions is None else _recover_all(gradient, factors, directions, examples, "sparse directions")
    if whole is not None and whole.found == factors.rank:
        return whole
    if (extended := _search_beside(gradient, groups, factors, forward, constant, find)) is not None:
        joined = _recover_all(gradient, factors, extended, examples, "sparse directions")
        if joined.found == factors.rank:
            return joined
    note = note_fewer(factors.rank, examples)
    isolated = recover_groups(
        gradient, groups.directions @ factors.basis, groups, rank=factors.rank, examples=examples, note=note
    )
    num_certain = int((isolated.certainty > SINGLE_NEURON_CERTAINTY).sum())
    return isolated if whole is None or whole.found < num_certain or (whole.found == 0 and isolated.found > 0) else whole


def _combine_groups(groups: Groups, factors: Factors, forward: Tensor, constant: Tensor | None) -> Directions | None:
    """Return the directions of the R examples (see `Directions`) from groups of parallel rows of the gradient.

    Returns None if fewer than R groups are certain and have independent directions.
    Each group's direction is one example's [x, 1] up to a factor, in the coordinates of the gradient's basis. The directions of
    the examples (see `sparse`) are the columns of the inverse of the matrix that has R such vectors as rows.
    forward, constant: as for `DirectionSearch`.
    """
    sure = groups.directions[groups.confirmed]
    chosen = select_independent(sure)
    if len(chosen) < factors.rank:
        return None
    q, info = torch.linalg.inv_ex(sure[chosen])
    return None if int(info) else Directions(q, measure_agreement(q, find_pattern(q, factors), forward, constant), 0)


def _search_beside(
    gradient: LayerGradient, groups: Groups, factors: Factors, forward: Tensor, constant: Tensor | None, find: DirectionSearch
) -> Directions | None:
    """Search for the directions of all examples, given those that are recovered from groups of parallel rows alone.

    Returns None if no example is recovered from a group alone, if the directions of the remaining examples are not found, or
    without a bias. Only examples count whose values are those of an 8-bit image, and, unless `LayerGradient.uniform` is set,
    those whose group has more rows than chance explains (`Groups.confirmed`). Values of an 8-bit image are rounded to its levels.
    groups: in the coordinates of the basis. forward, constant: as for `DirectionSearch`.
    """
    if constant is None:
        return None
    x, fits = gradient.compute_inputs(groups.directions @ factors.basis)
    stored = fits & gradient.is_eight_bit(x)
    sure = stored | (groups.confirmed & fits & (not gradient.uniform))
    x = gradient.round_to_eight_bit(x, stored)
    known = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)[sure] @ factors.basis.T
    return find_remaining(factors, known, forward, constant, find)


def _recover_all(
    gradient: LayerGradient, factors: Factors, directions: Directions, examples: int | None, how: str
) -> LinearAnswer:
    """Recover the inputs of the layer for a batch from the R directions of its examples, see `sparse`.

    Along an example's direction, a neuron is zero if ReLU turns it off for that example. If inputs and zeros
    together explain the gradient up to its noise, all examples are returned. If they do not, an example is returned only if
    its agreement (`Directions.agreement`) is at least MIN_AGREEMENT.
    factors:  the gradient, factorised with rank R. directions: of the examples.
    examples: number of examples of the batch, if known; the answer has a note if R is smaller.
    how:      the method that found the directions, for the answer.
    """
    p, info = torch.linalg.inv_ex(directions.q)
    if int(info):
        return build_empty_answer(gradient.layer, "no independent directions were found", rank=factors.rank)
    pattern = find_pattern(directions.q, factors)
    x, d, certainty = p @ factors.basis, factors.coordinates @ directions.q, directions.agreement
    sure = certainty >= MIN_AGREEMENT
    settled = _fit_gradient(gradient, factors, x, pattern.on, sure)
    if settled is not None:
        (x, d), certainty, sure = settled, certainty.clamp(min=MIN_AGREEMENT), torch.ones_like(sure)
    side = gradient.find_scales(x, pattern.on)
    x, d = x / side[:, None], d * side
    sure = sure & torch.isfinite(x).all(dim=1)
    if gradient.biased and settled is not None and bool(sure.all()):
        inverse, info = torch.linalg.inv_ex(x @ factors.basis.T)
        x = x if int(info) else match_kinks(x, gradient.weight, find_pattern(inverse, factors))
    x = x[:, :-1] if gradient.biased else x
    missing = factors.rank - int(sure.sum())
    note = join_notes(
        note_fewer(factors.rank, examples),
        f"{missing} of {factors.rank} examples could not be separated" if missing else "",
        "" if gradient.biased or missing == factors.rank else UNSCALED,
    )
    return LinearAnswer(
        x=x[sure], d=d.T[sure], certainty=certainty[sure], rank=factors.rank,
        how=how if bool(sure.any()) else "", note=note, scaled=gradient.biased,
    )  # fmt: skip


def _fit_gradient(
    gradient: LayerGradient, factors: Factors, x: Tensor, observed_on: Tensor, sure: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return inputs x (R, F'), up to a factor each, and gradients D (M, R) that explain the observed gradient, or None.

    D is zero where x turns neurons off. The zeros of D and the inputs x are fitted alternately, which corrects a few errors,
    until they explain the gradient up to its noise. If that fails and all examples are certain, x and D are fitted to the
    observed zeros instead, however well they explain the gradient.
    x: starting point. observed_on: (M, R) neurons that are on, as observed. sure: (R,) which examples are certain.
    """
    rows, noise, live = gradient.rows[factors.live], factors.noise[factors.live], factors.live.nonzero()[:, 0]
    there, on = x, observed_on
    for _ in range(MAX_ALTERNATIONS):
        on = (gradient.weight @ (there / gradient.find_scales(there, on)[:, None]).T) > 0
        d, there, error = polish(rows, noise, on[live], there)
        if not bool(torch.isfinite(there).all()):
            break
        if error <= MAX_RESIDUAL:
            return there, there.new_zeros(on.shape).index_put((live,), d)
    if not bool(sure.all()):
        return None
    d, there, error = polish(rows, noise, observed_on[live], x)
    return (there, there.new_zeros(on.shape).index_put((live,), d)) if error < float("inf") else None


def note_fewer(rank: int, examples: int | None) -> str:
    """Return a note that the gradient shows fewer examples than the batch has; "" if it does not, or if this is unknown."""
    if examples is None or rank >= examples:
        return ""
    return (
        f"the gradient of the first layer has rank {rank} for {examples} examples: some examples are equal, or contribute less "
        "to it than its rounding or noise"
    )
