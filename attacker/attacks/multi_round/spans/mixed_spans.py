"""Spans in which images are left to separate by independent component analysis: of batches, isolated clients, and sums."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from attacker.attacks.cases import Case
from attacker.attacks.closed_form.linear.low_rank import Factors
from attacker.attacks.multi_round.spans.cohorts import ClientPart, IsolatedClient, orthonormalise
from attacker.attacks.multi_round.spans.components import MixedImages, find_known, is_separable, mix_images
from attacker.attacks.multi_round.spans.layer_rows import join_parameters
from attacker.attacks.multi_round.spans.recovery import RecoveredExamples
from attacker.attacks.multi_round.spans.row_space import RowSpace, intersect
from attacker.attacks.multi_round.spans.same_batch import make_factors, stack_spaces
from attacker.attacks.networks.input_layer import InputLayer
from fedsim.recording.observation import DataSpec

MIN_GAP = 3.0
"""Smallest `RowSpace.gap` of a space that is taken to be whole although it has fewer dimensions than there are examples."""


def list_mixed_batches(
    found: RecoveredExamples,
    spaces: Sequence[RowSpace],
    shared: Tensor,
    forwards: Mapping[int, Callable[[], Tensor]],
    data: DataSpec,
) -> list[MixedImages]:
    """Return the spans of batches of which some images are not known, and their intersections of at least two dimensions.

    Spans that independent component analysis cannot separate (`is_separable`) are left out, and those of row spaces that are not
    whole (`is_whole`).
    shared: as `recovery.count_all_shared` returns it. The rows of an update are used only if the update is of one step on a layer
    with ReLU, see `attack.list_forwards`.
    """
    known, held = find_known(found).tolist(), torch.zeros(len(spaces), len(found.vectors), dtype=torch.long)
    for i, holders in enumerate(found.holders):
        held[list(holders), i] = int(known[i])
    missing = shared - held @ held.T
    wanted = [t for t, space in enumerate(spaces) if missing[t, t] > 0 and is_whole(space)]
    mixed = []
    for t in wanted:
        if is_separable(spaces[t].rank, data):
            mixed.append(mix_images(stack_spaces([spaces[t]]), (t,), forwards[t]() if t in forwards else None))
        for other in ((shared[t] > 1) & (missing[t] > 0)).nonzero()[:, 0].tolist():
            if other <= t or not is_whole(spaces[other]) or not is_separable(int(shared[t, other]), data):
                continue
            common = intersect(spaces[t].y, spaces[other].y).y
            if len(common):
                mixed.append(mix_images(_make_span(common), (t, other), None))
    return mixed


def list_mixed_sums(
    case: Case,
    layer: InputLayer,
    spaces: Sequence[RowSpace],
    clients: Mapping[str, IsolatedClient],
    parts: Mapping[str, ClientPart],
    *,
    relu: bool,
) -> list[MixedImages]:
    """Return the spans of isolated clients and of sums. Sums of the same cohort with equal row spaces are one span.

    Spans that independent component analysis cannot separate (`is_separable`) are left out, and those of sums whose row spaces
    are not whole (`is_whole`). The span of a client is left out as well if the client took part in a sum that is not whole but
    does not have full rank either.
    relu: whether ReLU follows the layer. If it does not, the rows of updates are not used.
    """
    data, seen = case.observations[0].data, case.observations
    mixed = []

    def join_sent(sums: Sequence[int]) -> Tensor | None:
        return torch.cat([join_parameters(seen[t].weights, layer) for t in sums]) if relu and sums else None

    for name, client in clients.items():
        own = [t for t, observation in enumerate(seen) if name in observation.cohort and not spaces[t].saturated]
        if not is_separable(len(client.y), data) or not all(is_whole(spaces[t]) for t in own):
            continue
        if name in parts:
            rows = parts[name].space
            factors = make_factors(rows.coordinates, orthonormalise(client.y), rows.noise)
            mixed.append(mix_images(factors, own, join_sent(parts[name].sums)))
        else:
            mixed.append(mix_images(_make_span(client.y), own, None))
    for group in _group_equal_sums(spaces, [observation.cohort for observation in seen], data):
        mixed.append(mix_images(stack_spaces([spaces[t] for t in group]), group, join_sent(group)))
    return mixed


def is_whole(space: RowSpace) -> bool:
    """Return whether a row space is the span of all examples that left a trace in an update.

    A row space is taken to be whole if it has as many dimensions as there are examples, or if none of its dimensions is nearly
    hidden by noise. If a dimension is nearly hidden, others are hidden entirely, and the rest of the span consists of mixtures.
    Two kinds of spaces are never whole: those of rank 0, and those whose matrix has full rank (`RowSpace.saturated`), as many
    dimensions as nonzero rows or as columns, since there may then be more examples than dimensions.
    """
    return not space.saturated and bool(space.rank) and (space.complete or space.gap >= MIN_GAP)


def _group_equal_sums(spaces: Sequence[RowSpace], cohorts: Sequence[Sequence[str]], data: DataSpec) -> list[list[int]]:
    """Return groups of sums of one cohort with equal row spaces, as indices. Sums that cannot be separated are left out."""
    groups: list[list[int]] = []
    for t, space in enumerate(spaces):
        if not is_whole(space) or not is_separable(space.rank, data):
            continue
        for group in groups:
            first = spaces[group[0]]
            same = first.rank == space.rank and set(cohorts[group[0]]) == set(cohorts[t])
            if same and len(intersect(first.y, space.y).y) == space.rank:
                group.append(t)
                break
        else:
            groups.append([t])
    return groups


def _make_span(y: Tensor) -> Factors:
    """Return the span of independent vectors y (R, F) as a factorisation without rows."""
    basis = orthonormalise(y)
    return make_factors(basis.new_zeros(0, len(basis)), basis, basis.new_zeros(0))
