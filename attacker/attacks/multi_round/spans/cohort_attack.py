"""Attack `cohort_spans`: reconstructs examples from secure sums and names their owners, given who took part in each sum."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Generator

from attacker.attacks.answers import build_reconstruction
from attacker.attacks.base import Memory, Progress, explain_refusal
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.multi_round.disaggregation import attack_solved_sums
from attacker.attacks.multi_round.spans.certainty import CERTAIN, judge_certainty, judge_clearance, label_examples
from attacker.attacks.multi_round.spans.client_groups import group_by_client
from attacker.attacks.multi_round.spans.cohorts import (
    ClientPart,
    IsolatedClient,
    find_common,
    isolate_clients,
    list_mixed_sums,
    name_owner,
    split_sums,
)
from attacker.attacks.multi_round.spans.components import add_components, append_estimates
from attacker.attacks.multi_round.spans.intersections import RecoveredExamples, mark_plausible
from attacker.attacks.multi_round.spans.layer_updates import (
    LayerUpdates,
    compute_spaces,
    convert_to_examples,
    find_chain,
    join_parameters,
    list_forwards,
    precedes_relu,
    require_input_layer,
)
from attacker.attacks.multi_round.spans.relu_zeros import (
    PARALLEL_CLEARANCE,
    find_lone_rows,
    has_independent_errors,
    separate_by_zeros,
)
from attacker.attacks.multi_round.spans.row_space import RowSpace
from attacker.attacks.needs import Need
from attacker.attacks.networks.input_layer import InputLayer
from attacker.attacks.nulls import PriorNull
from attacker.attacks.simulation.client import find_schedule
from attacker.reconstruction import Reconstruction, Slot
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.observation import Observation

SUM_NEEDS = frozenset({Need.SAME_CLIENT, Need.SECURE_SUM})
COHORT_NEEDS = SUM_NEEDS | {Need.INPUT_LAYER}
UNKNOWN_OWNER = SUM_CLIENT
"""Client that is named in the slots (positions) of an example whose owner is not known."""


@dataclass(kw_only=True)
class CohortSpans:
    """An attack that isolates the spans of single clients' examples in secure sums, and separates the examples in a span.

    The span of examples x is the set of all linear combinations of their vectors [x, 1].
    lone_rows: whether to look also for examples that alone turn on neurons of a sum, see `find_lone_rows`.
    components: whether to use independent component analysis (`components`) to separate the images of spans that these
              neurons do not open.
    repeated: whether to solve the sums for single clients' updates instead of isolating spans (`attack_solved_sums`). The updates
              of a client are then assumed equal in all of its rounds.
    """

    name: str = "cohort_spans"
    lone_rows: bool = True
    components: bool = True
    repeated: bool = False
    needs: frozenset[Need] = field(default=COHORT_NEEDS)
    device: str = "cpu"

    def null(self) -> PriorNull:
        return PriorNull(self.name, self.needs)

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Return one reconstruction for each of `cases` of secure sums.

        Raises ValueError with the reason if a case cannot be attacked, or if none of its examples is recovered.
        """
        for case in cases:
            if refusal := explain_refusal(self, case):
                raise ValueError(f"{self.name} cannot attack {case.key}: {refusal}")
        if self.repeated:
            return [attack_solved_sums(case, self.name, rng, progress, self.device) for case in cases]
        return [self._attack(case, rng, progress) for case in cases]

    def _attack(self, case: Case, rng: Generator, progress: Progress | None) -> Reconstruction:
        started, first = perf_counter(), case.observations[0]
        layer = require_input_layer(first)
        bounded = Case(
            tuple(replace(observation, num_examples=count_most_examples(observation)) for observation in case.observations),
            links=case.links,
        )
        spaces = compute_spaces(bounded, layer, rng, progress, self.device)
        cohorts = [observation.cohort for observation in case.observations]
        clients = isolate_clients(spaces, cohorts, case.rounds)
        parts = split_sums(spaces, cohorts, clients)
        notes = _describe(spaces, clients, cohorts)
        updates = LayerUpdates(spaces, list_forwards(case, layer), layer.specify_input(first.data))
        recovered = self._separate(first, updates, parts)
        recovered = judge_clearance(recovered, updates)
        if self.components:
            mixed = list_mixed_sums(case, layer, spaces, clients, parts, relu=precedes_relu(first, layer))
            recovered, estimates = add_components(recovered, mixed, updates, seed_generator(rng, case, "components"))
            recovered = append_estimates(judge_clearance(recovered, updates), estimates)
            notes = (*notes, f"{len(estimates.vectors)} images are estimated by independent component analysis")
        if not len(recovered.vectors):
            raise ValueError(
                f"no example could be recovered from the secure sums: {'; '.join(notes)}; attack more rounds, or use another "
                "attack"
            )
        groups = _group(case, layer, recovered, spaces)
        owners, numbers = _name_owners(recovered, groups, cohorts)
        named = sum(owner != "" for owner in owners)
        note = f"{sum(map(len, groups))} of them form {len(groups)} groups of one client each, by neurons that local steps switch"
        return build_reconstruction(
            case,
            convert_to_examples(recovered.vectors, updates.data),
            label_examples(bounded, layer, recovered).y,
            attack=self.name,
            rng=rng,
            route="cohort spans",
            confidence=judge_certainty(recovered),
            slots=_list_slots(case, recovered.holders, owners),
            seconds=perf_counter() - started,
            evidence={
                "error": tuple(recovered.error.tolist()),
                "rounds": tuple(float(len(places)) for places in recovered.holders),
                "group": tuple(map(float, numbers)),
            },
            notes=(*notes, f"{named} of {len(owners)} examples have a single possible owner", note),
        )

    def _separate(self, first: Observation, updates: LayerUpdates, parts: Mapping[str, ClientPart]) -> RecoveredExamples:
        """Return the examples that zeros separate in the parts of single clients, and those of `find_lone_rows` in the sums."""
        spaces, (low, high) = updates.spaces, updates.limits
        parallel = has_independent_errors(first, find_chain(first))
        candidates = []
        for part in parts.values():
            own = separate_by_zeros(part.space)
            clear = torch.inf if part.space.rank == 1 else PARALLEL_CLEARANCE if parallel else 0.0
            candidates.append((own, own.new_full((len(own),), clear)))
        if self.lone_rows:
            candidates += [
                find_lone_rows(space, low, high, parallel=parallel, images=first.data.is_image) for space in spaces if space.rank
            ]
        nothing = RecoveredExamples.none(len(low) + 1)
        if not candidates:
            return nothing
        vectors, clearance = (torch.cat(each) for each in zip(*candidates, strict=True))
        plausible = mark_plausible(vectors, updates.limits)
        return nothing.add(vectors[plausible], clearance[plausible], spaces)


def cohort_spans(*, lone_rows: bool = True, components: bool = True, repeated: bool = False) -> CohortSpans:
    """Recover examples and their owners from secure sums, given which clients took part in each sum.

    The span of a client's examples, all linear combinations of their vectors [x, 1], is the intersection of the row spaces of the
    sums in which the client took part. The client's examples are then separated by the zeros that ReLU causes in the update.
    lone_rows: also look for examples that alone turn on a neuron of a sum, as SRATTA does: several neurons, or a single one if
               the values in its row are those of an 8-bit image.
    components: for images: estimate the images of spans that nothing else opens by independent component analysis. The zeros of
                ReLU make some of them exact; the confidence in the others is undecided.
    repeated: for any network: assume that a client sends the same update in every round, solve the sums for the updates of single
               clients, and attack these updates by the closed forms of `exact`. This fails unless the model's weights hardly
               change between rounds.
    """
    needs = SUM_NEEDS if repeated else COHORT_NEEDS
    return CohortSpans(lone_rows=lone_rows, components=components, repeated=repeated, needs=needs)


def count_most_examples(observation: Observation) -> int | None:
    """Return the largest possible number of examples behind a sum; None if nothing bounds it.

    The bound is the smaller of the number that clients report and the number that their prescribed local steps can use, as far as
    these are known.
    """
    training = observation.training
    prescribed = None if training.steps is None else training.steps * training.step_size * max(1, len(observation.cohort))
    counts = [count for count in (observation.num_examples, prescribed) if count]
    return min(counts) if counts else None


def list_owners(answer: Reconstruction) -> list[str]:
    """Return the owner that the attack names for each example, "" if it names none."""
    owners = [""] * len(answer.x)
    for slot in answer.slots:
        if slot.client != UNKNOWN_OWNER:
            owners[slot.example] = slot.client
    return owners


def list_groups(answer: Reconstruction) -> list[int]:
    """Return the number, from 1, of each example's group: examples that the attack found to be of one client; 0 for no group."""
    return [int(number) for number in answer.evidence.get("group", (0.0,) * len(answer.x))]


def _group(case: Case, layer: InputLayer, recovered: RecoveredExamples, spaces: Sequence[RowSpace]) -> list[list[int]]:
    """Return groups of certain examples of one client each, as lists of indices in `recovered`.

    There are no groups unless clients take several local steps without weight decay, and ReLU follows the first layer.
    An example that several clients hold would join the groups of these clients. Two rules prevent this: an example is left out if
    no client took part in all sums that contain it, and a group is left out if no client took part in all sums that contain any
    of its examples.
    """
    first = case.observations[0]
    if first.training.weight_decay or find_schedule(first)[1] == 1 or not precedes_relu(first, layer):
        return []
    common = [find_common(places, [observation.cohort for observation in case.observations]) for places in recovered.holders]
    sure = [i for i in (judge_certainty(recovered) == CERTAIN).nonzero()[:, 0].tolist() if common[i]]
    known = RecoveredExamples(recovered.vectors[sure], recovered.clearance[sure], tuple(recovered.holders[i] for i in sure))
    sent = [join_parameters(observation.weights, layer) for observation in case.observations]
    groups = group_by_client(known, spaces, sent, [max(1, len(observation.cohort)) for observation in case.observations])
    named = [[sure[i] for i in group] for group in groups]
    return [group for group in named if set.intersection(*(common[i] for i in group))]


def _name_owners(
    recovered: RecoveredExamples, groups: Sequence[Sequence[int]], cohorts: Sequence[Sequence[str]]
) -> tuple[list[str], list[int]]:
    """Return for each example the client that holds it, "" if that is not known, and the number of its group, 0 for none.

    An example without an owner gets the owner of its group. groups: from `_group`.
    """
    owners, numbers = [name_owner(places, cohorts) for places in recovered.holders], [0] * len(recovered.holders)
    for number, group in enumerate(groups, start=1):
        owner = name_owner(sorted({t for i in group for t in recovered.holders[i]}), cohorts)
        for i in group:
            numbers[i], owners[i] = number, owners[i] or owner
    return owners, numbers


def _list_slots(case: Case, holders: Sequence[Sequence[int]], owners: Sequence[str]) -> tuple[Slot, ...]:
    places = [0] * len(case.observations)
    slots = []
    for example, rounds_held in enumerate(holders):
        for t in rounds_held:
            slots.append(Slot(case.observations[t].round, owners[example] or UNKNOWN_OWNER, 1, places[t], example))
            places[t] += 1
    return tuple(slots)


def _describe(
    spaces: Sequence[RowSpace], clients: dict[str, IsolatedClient], cohorts: Sequence[Sequence[str]]
) -> tuple[str, ...]:
    """Return notes on the ranks of the sums, and on the number and names of the clients that were isolated."""
    ranks = [space.rank for space in spaces]
    everyone = {name for cohort in cohorts for name in cohort}
    notes = [f"{len(ranks)} sums of rank {min(ranks)} to {max(ranks)}"]
    if full := sum(space.saturated for space in spaces):
        notes.append(f"{full} sums have full rank: the layer is too narrow for their examples, so that they cannot be split")
    if len({tuple(sorted(cohort)) for cohort in cohorts}) == 1:
        notes.append("the cohort never changes, so that no client can be isolated")
    places = ", ".join(
        f"{name} after round {answer.round} ({len(answer.y)} examples)" for name, answer in sorted(clients.items())
    )
    return (*notes, f"{len(clients)} of {len(everyone)} clients are isolated{': ' if places else ''}{places}")
