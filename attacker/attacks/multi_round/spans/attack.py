"""Attack `spans`: examples in closed form from the row spaces of one client's first-layer updates over many rounds.

The row space of an update, a matrix with one row per neuron, is spanned by the vectors [x, 1] of the examples x in its batch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Generator, Tensor

from attacker.attacks.answers import build_reconstruction
from attacker.attacks.base import Memory, Progress
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.closed_form.linear.constant_modulus import build_templates
from attacker.attacks.closed_form.linear.label_gradients import MIXED_LABELS
from attacker.attacks.multi_round.spans.certainty import judge_certainty, judge_clearance, label_examples
from attacker.attacks.multi_round.spans.client_groups import group_updates
from attacker.attacks.multi_round.spans.components import add_components, append_estimates, list_mixed_batches
from attacker.attacks.multi_round.spans.intersections import RecoveredExamples, recover
from attacker.attacks.multi_round.spans.layer_updates import (
    LayerUpdates,
    compute_spaces,
    convert_to_examples,
    find_chain,
    list_forwards,
    require_input_layer,
)
from attacker.attacks.multi_round.spans.relu_zeros import add_lone_rows, add_separated, has_independent_errors
from attacker.attacks.multi_round.spans.row_space import RowSpace, count_all_shared
from attacker.attacks.multi_round.spans.same_batch import add_same_batches
from attacker.attacks.needs import Need
from attacker.attacks.nulls import PriorNull
from attacker.attacks.simulation.client import find_schedule
from attacker.reconstruction import Reconstruction, Slot, list_slots

SPAN_NEEDS = frozenset({Need.SAME_CLIENT, Need.NUM_EXAMPLES, Need.INPUT_LAYER})
UNNAMED_NEEDS = SPAN_NEEDS - {Need.SAME_CLIENT} | {Need.UNNAMED}


@dataclass(kw_only=True)
class Spans:
    """An attack that intersects the row spaces of a client's updates of the linear layer whose input is the example itself.

    With `UNNAMED_NEEDS`, a case holds the updates of all clients without their names. The attack then also groups the updates by
    client.

    relu:    whether to look also for examples by the zeros of ReLU: those that alone turn on neurons, and the remaining ones of a
             batch (`relu_zeros`); and batches that several rounds share as a whole (`same_batch`).
    components: whether to use independent component analysis (`components`) to separate the images of spans that nothing else
             opens.
    """

    name: str = "spans"
    relu: bool = True
    components: bool = True
    needs: frozenset[Need] = field(default=SPAN_NEEDS)
    device: str = "cpu"

    def null(self) -> PriorNull:
        return PriorNull(self.name, self.needs)

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Return one reconstruction for each of `cases`.

        A case holds the updates of one client, or with `UNNAMED_NEEDS` of all clients.

        Raises ValueError with the reason if a case cannot be attacked, or if none of its examples is recovered.
        """
        return [self._attack(case, rng, progress) for case in cases]

    def _attack(self, case: Case, rng: Generator, progress: Progress | None) -> Reconstruction:
        started, first = perf_counter(), case.observations[0]
        layer = require_input_layer(first)
        spaces = compute_spaces(case, layer, rng, progress, self.device)
        updates = LayerUpdates(spaces, list_forwards(case, layer), layer.specify_input(first.data))
        shared = count_all_shared(spaces, seed_generator(rng, case, "projection"))
        recovered = recover(updates, shared)
        isolated = len(recovered.vectors)
        if self.relu:
            recovered = _add_by_zeros(recovered, case, updates, shared, rng)
        exact = len(recovered.vectors)
        recovered = judge_clearance(recovered, updates)
        if self.components:
            unopened = list_mixed_batches(recovered, updates, shared)
            recovered, estimates = add_components(recovered, unopened, updates, seed_generator(rng, case, "components"))
            exact = len(recovered.vectors)
            recovered = append_estimates(judge_clearance(recovered, updates), estimates)
        notes = _describe(spaces, shared, isolated, exact)
        if self.components:
            notes = (*notes, f"{len(estimates.vectors)} images are estimated by independent component analysis")
        groups: list[list[int]] = []
        if Need.UNNAMED in self.needs:
            groups = group_updates(spaces, shared, case.rounds)
            notes = (*notes, _describe_groups(groups))
        if not len(recovered.vectors):
            raise ValueError(
                f"no example could be recovered from the updates: {'; '.join(notes)}; use an attack that searches, such as cpl"
            )
        labels, mixed = label_examples(case, layer, recovered)
        if bool(mixed.any()):
            recovered = replace(recovered, clearance=recovered.clearance.masked_fill(mixed, 0.0))
            notes = (*notes, f"{int(mixed.sum())} examples are undecided: {MIXED_LABELS}")
        return build_reconstruction(
            case,
            convert_to_examples(recovered.vectors, updates.data),
            labels,
            attack=self.name,
            rng=rng,
            route="spans",
            confidence=judge_certainty(recovered),
            slots=_list_found_slots(case, recovered.holders, groups),
            seconds=perf_counter() - started,
            evidence={
                "clearance": tuple(recovered.clearance.clamp(max=1e9).tolist()),
                "error": tuple(recovered.error.tolist()),
                **({"group": _number_groups(recovered.holders, groups)} if groups else {}),
            },
            notes=notes,
        )


def spans(*, relu: bool = True, components: bool = True, anonymous: bool = False) -> Spans:
    """Recover examples x as intersections of row spaces of first-layer updates over rounds.

    Where two batches share exactly one example, their row spaces in general share only the multiples of [x, 1].

    relu: also use the zeros that ReLU causes in updates: look for examples that alone turn on neurons, for the remaining examples
          of batches of one local step, and for whole batches that a client uses in several rounds. False: intersections alone.
    components: for images: estimate the images of batches that nothing else opens by independent component analysis. The zeros
          of ReLU make some of them exact; the confidence in the others is undecided.
    anonymous: whether the server does not see which client sent an update, a weaker attacker. All updates are then attacked
          together, and grouped by the examples that they share.
    """
    return Spans(relu=relu, components=components, needs=UNNAMED_NEEDS if anonymous else SPAN_NEEDS)


def _add_by_zeros(
    recovered: RecoveredExamples, case: Case, updates: LayerUpdates, shared: Tensor, rng: Generator
) -> RecoveredExamples:
    """Return the examples found, and those that the zeros show that ReLU causes in the updates, see `spans`."""
    first = case.observations[0]
    chain = find_chain(first)
    recovered = add_lone_rows(recovered, updates, parallel=has_independent_errors(first, chain))
    if not updates.forwards:
        return recovered
    recovered = add_separated(recovered, updates)

    def get_templates(t: int) -> Tensor | None:
        return None if chain is None else build_templates(chain, case.observations[t].weights, updates.limits)

    return add_same_batches(recovered, updates, shared, get_templates, seed_generator(rng, case, "same batch"))


def _list_found_slots(case: Case, holders: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> tuple[Slot, ...]:
    """Return slots (positions in batches) for examples in the observations that contain them, as far as positions suffice.

    Which free position an example gets within an observation is arbitrary. holders: indices of the observations of each example.
    groups: groups of observations without names; the client of a slot is then "group-1" for the first group, and so on.
    """
    names = {t: f"group-{number}" for number, group in enumerate(groups, start=1) for t in group}
    places = [
        iter(
            list_slots(
                observation.round,
                names.get(t, observation.client),
                find_schedule(observation)[0],
                observation.num_examples or None,
            )
        )
        for t, observation in enumerate(case.observations)
    ]
    slots = []
    for example, rounds_held in enumerate(holders):
        for t in rounds_held:
            if (slot := next(places[t], None)) is not None:
                slots.append(replace(slot, example=example))
    return tuple(slots)


def _number_groups(holders: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Return for each example the number, from 1, of the group of observations that hold it; 0 if several or none do.

    holders: indices of the observations that hold each example. groups: lists of indices of observations.
    """
    number = {t: n for n, group in enumerate(groups, start=1) for t in group}
    own = [{number[t] for t in held} for held in holders]
    return tuple(float(next(iter(groups))) if len(groups) == 1 else 0.0 for groups in own)


def _describe_groups(groups: Sequence[Sequence[int]]) -> str:
    several = [len(group) for group in groups if len(group) > 1]
    size = f"{several[-1]} to {several[0]} updates each" if several else "none of several updates"
    return f"{sum(map(len, groups))} updates without names form {len(groups)} groups by shared examples, {len(several)} of {size}"


def _describe(spaces: Sequence[RowSpace], shared: Tensor, isolated: int, recovered: int) -> tuple[str, ...]:
    """Return notes on the ranks of the row spaces, the examples that rounds share, and the examples that were recovered.

    shared: as `count_all_shared` returns it. isolated: number of examples from intersections alone. recovered: number of all
    examples, including those from the zeros of ReLU.
    """
    ranks = [space.rank for space in spaces]
    overlaps = Counter(shared[i, j].item() for i, j in torch.combinations(torch.arange(len(spaces))).tolist())
    overlap = ", ".join(f"{pairs} pairs of rounds share {count} examples" for count, pairs in sorted(overlaps.items()) if count)
    notes = [f"{len(ranks)} row spaces of rank {min(ranks)} to {max(ranks)}", overlap or "no two rounds share an example"]
    if full := sum(space.saturated for space in spaces):
        notes.append(f"{full} updates have full rank: their batches may have too many examples for the layer to separate")
    notes.append(f"{isolated} examples were recovered as the only direction that the row spaces of several rounds share")
    return (
        (*notes, f"{recovered - isolated} more were recovered from the zeros of ReLU") if recovered > isolated else tuple(notes)
    )
