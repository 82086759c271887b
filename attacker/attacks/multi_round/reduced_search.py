"""The rounds of a client that closed forms leave to a search, and the examples in them that are known from other rounds."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from attacker.attacks.base import Memory
from attacker.attacks.cases import Case
from attacker.attacks.closed_form.attack import MAX_NOISE_RATIO
from attacker.attacks.closed_form.observations import observe
from attacker.attacks.closed_form.routing import EXACT_DISTANCE
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.probes import compute_head_inputs
from attacker.attacks.linking import Links, RoundDescription, describe_gaps
from attacker.attacks.linking.matching import match_optimally
from attacker.attacks.matching.warm_starts import HeldExamples
from attacker.attacks.multi_round.certified_examples import CertifiedExamples, split_known_labels
from attacker.attacks.simulation.client import build_network, find_schedule
from attacker.reconstruction import Reconstruction, Slot, list_slots

MAX_FEATURE_RATIO = 0.1
"""Largest distance at which features read off a gradient count as the features of a known example, relative to the median
distance to the features of other examples. On 24 CIFAR-10 images of the tuning part, 12 of which were known, this limit found 12,
12 and 7 of the known images in batches of 2, 4 and 8 on CPL's untrained LeNet, and named none wrongly."""


@dataclass(frozen=True)
class ReducedSearch:
    """The search that is left for a client after closed forms have certified some examples, which are called known.

    case:  the rounds to be searched, with links, which number the distinct examples of these rounds from 0 to V - 1 and state
           which of them is at each batch position (`Links`); None if there are no rounds to be searched.
    held:  (V,) int64, for each of these V examples its index among the known examples, or -1 if it is unknown.
    slots: positions in the batches of rounds that no closed form certified, but whose examples are all known from other rounds,
           each with the index of its known example. These rounds are not searched.
    notes: remarks on the rounds.
    """

    case: Case | None
    held: Tensor
    slots: tuple[Slot, ...] = ()
    notes: tuple[str, ...] = ()

    def hold(self, known: CertifiedExamples) -> Mapping[str, HeldExamples]:
        """Return a dict from the key of `case` to the known examples that its search must not change; empty if there are none."""
        if self.case is None or not bool((self.held >= 0).any()):
            return {}
        return {self.case.key: HeldExamples(known.x[self.held.clamp(min=0)].float(), self.held >= 0)}


def select_rounds(case: Case, kept: Collection[int]) -> Case | None:
    """Return the case with only the observations of the rounds `kept`; None if it has no such observations.

    Known labels of these observations are kept. The result has no links and no known logits.
    """
    at = [o for o, observation in enumerate(case.observations) if observation.round in kept]
    labels = split_known_labels(case)
    known = None if case.known_labels is None else torch.cat([one for o in at if (one := labels[o]) is not None])
    return Case(tuple(case.observations[o] for o in at), known) if at else None


def _select_places(links: Links, at: Sequence[int]) -> tuple[Links, Tensor]:
    """Return the links restricted to the observations with indices `at`, and the old number of each example that is left, (V,).

    Links state which batch positions hold the same example. The V examples that occur in these observations are numbered anew
    from 0; entry v of the second result is the number of example v in `links`.
    """
    numbers, places = torch.unique(torch.cat([links.places[o] for o in at]), return_inverse=True)
    chosen = replace(
        links,
        places=tuple(places.split([len(links.places[o]) for o in at])),
        confidence=links.confidence[numbers],
        labels=None if links.labels is None else links.labels[numbers],
        epochs=tuple(links.epochs[o] for o in at) if links.epochs else (),
    )
    return chosen, numbers


def mark_notes(linked: Case) -> Case:
    """Return a case with its notes on links changed to say that they concern only the rounds that are searched.

    linked: the rounds of a client that are searched, with links. Notes that there is no usable round between two of them are left
    out, since the rounds between may only have been taken out of the search.
    """
    assert linked.links is not None
    gaps = describe_gaps(linked.rounds)
    notes = tuple(f"of the searched rounds: {note}" for note in linked.links.notes if note not in gaps)
    return replace(linked, links=replace(linked.links, notes=notes))


def explain_rounds(
    case: Case, known: CertifiedExamples, knows_defense: bool, device: str
) -> tuple[Case | None, tuple[Slot, ...]]:
    """Return the case without the rounds that the known examples explain, and the slots of the known examples in these rounds.

    For clients that use the same examples in every round: a round is explained if its gradient is the gradient of all known
    examples together. The case is None if no round is left.
    """
    rows = torch.arange(len(known.x))
    slots: list[Slot] = []
    left = []
    for observation in case.observations:
        if observation.num_examples == len(known.x) and _is_explained(Case((observation,)), known, rows, knows_defense, device):
            slots += list_slots(observation.round, observation.client, find_schedule(observation)[0], len(rows))
        else:
            left.append(observation.round)
    return select_rounds(case, left), tuple(slots)


def find_known_examples(
    linked: Case, described: Sequence[RoundDescription], known: CertifiedExamples, knows_defense: bool, device: str
) -> ReducedSearch:
    """Return what is left to search after known examples are found in rounds that no closed form certified, by their features.

    Features are the inputs of the last layer, computed from a round's gradient. A linked example counts as a known example if its
    features in every batch position that it holds match that known example. If all examples of a round are known, the round's
    gradient must be the gradient of these examples; if it is not, they are searched for as if they were unknown.
    linked: the rounds with links. described: their descriptions; empty if they have none, so that no example is known.
    """
    links = linked.links
    assert links is not None
    if not described:
        return ReducedSearch(linked, torch.full((links.examples,), -1))
    matched = [_match_features(linked, o, description, known, knows_defense, device) for o, description in enumerate(described)]
    held = _agree(links, matched)
    explained: list[int] = []
    for o, observation in enumerate(linked.observations):
        rows = held[links.places[o]]
        if bool((rows >= 0).all()):
            if _is_explained(Case((observation,)), known, rows, knows_defense, device):
                explained.append(o)
            else:
                held[links.places[o]] = -1
    explained = [o for o in explained if bool((held[links.places[o]] >= 0).all())]
    slots = tuple(slot for o in explained for slot in _list_places(linked, o, held[links.places[o]].tolist()))
    rest = [o for o in range(len(linked.observations)) if o not in explained]
    if not rest:
        return ReducedSearch(None, held[:0], slots)
    chosen, numbers = _select_places(links, rest)
    held = held[numbers]
    if chosen.labels is not None:
        chosen = replace(chosen, labels=torch.where(held >= 0, known.y[held.clamp(min=0)], chosen.labels))
    kept = select_rounds(linked, [linked.observations[o].round for o in rest])
    assert kept is not None
    return ReducedSearch(replace(kept, links=chosen), held, slots)


def _list_places(case: Case, o: int, examples: Sequence[int]) -> list[Slot]:
    """Return the slots (batch positions) of observation `o` of a case. examples: index of the example in each batch position."""
    observation = case.observations[o]
    slots = list_slots(observation.round, observation.client, find_schedule(observation)[0], len(examples))
    return [replace(slot, example=examples[slot.example]) for slot in slots]


def _agree(links: Links, matched: Sequence[Tensor]) -> Tensor:
    """Return for each of V linked examples the known example that all of its batch positions match (`matched`), or -1."""
    held = torch.full((links.examples,), -2)
    for places, matches in zip(links.places, matched, strict=True):
        before = held[places]
        held[places] = torch.where((before == -2) | (before == matches), matches, -1)
    return held


def _match_features(
    case: Case, o: int, description: RoundDescription, known: CertifiedExamples, knows_defense: bool, device: str
) -> Tensor:
    """Return for each batch position of an observation the index of the known example that it matches, or -1, (N,).

    A position and a known example match if their labels are equal and their features are near, see MAX_FEATURE_RATIO. A known
    example matches one position at most. The features of known examples are computed at the weights of the observation's round.
    """
    matches = torch.full((len(description.labels),), -1)
    if description.features is None:
        return matches
    observation = case.observations[o]
    model = build_network(observation).to(device)
    observed = ObservedGradients([observation], model=model, device=device, knows_defense=knows_defense)
    state = observed.get_state(0)
    with torch.no_grad():
        x = observed.data.normalise(known.x.to(device))
        features = compute_head_inputs(model, observed.data, {**state["buffers"], **state["weights"]}, x)[0].cpu().double()
    inferred = description.features.double()
    distance = torch.cdist(inferred, features)
    for row, column in match_optimally(distance.masked_fill(description.labels[:, None] != known.y[None], torch.inf).float()):
        others = torch.cat(
            [distance[row, torch.arange(len(features)) != column], torch.cdist(inferred[row : row + 1], inferred)[0]]
        )
        others = others[others > 0]
        if len(others) and float(distance[row, column]) <= MAX_FEATURE_RATIO * float(others.median()):
            matches[row] = column
    return matches


def _is_explained(case: Case, known: CertifiedExamples, rows: Tensor, knows_defense: bool, device: str) -> bool:
    """Return whether known examples explain a case of one observation, up to rounding or the known noise. rows: their indices."""
    seen = observe([case], knows_defense=knows_defense, device=device)
    maximum = max(EXACT_DISTANCE, MAX_NOISE_RATIO * seen.estimate_noise(0))
    return seen.measure_misfit(0, known.x[rows].to(device), known.y[rows].to(device)) <= maximum


def has_earlier_search(memory: Memory | None) -> bool:
    """Return whether a checkpoint holds a search without closed forms, which must be resumed without them."""
    return memory is not None and any(memory.recall(f"joint 0/{key}") is not None for key in ("restart 0", "best"))


def join_answers(
    case: Case, known: CertifiedExamples, reduced: ReducedSearch, searched: Reconstruction | None, *, attack: str, seed: int
) -> Reconstruction:
    """Return one reconstruction: the certified examples, with their own confidence, then those that were searched for, if any."""
    notes = (*known.describe(), *reduced.notes)
    routes = ", ".join(dict.fromkeys(known.routes.values()))
    certified = Reconstruction(
        case=case.key,
        x=known.x,
        y=known.y,
        confidence=known.confidence,
        explained=known.explained,
        evidence=known.evidence,
        slots=tuple(sorted((*known.slots, *reduced.slots), key=lambda slot: slot.round)),
        loss=torch.tensor([known.missed]),
        iterations=0,
        evaluations=known.evaluations,
        restarts=1,
        seconds=known.seconds,
        route=routes,
        attack=attack,
        oracles=known.oracles,
        seed=seed,
        notes=notes,
    )
    return certified if searched is None else _add_searched(certified, reduced, searched)


def _add_searched(certified: Reconstruction, reduced: ReducedSearch, searched: Reconstruction) -> Reconstruction:
    """Return a reconstruction of the certified examples, followed by those that the search found.

    Examples that the search left as they are (`reduced.held`), since they are certified, occur only once.
    """
    free = (reduced.held < 0).nonzero().flatten().tolist()
    count, others = len(certified.x), searched.select(free)
    number = {v: count + i for i, v in enumerate(free)} | {v: e for v, e in enumerate(reduced.held.tolist()) if e >= 0}
    explained = torch.full_like(others.confidence, torch.nan) if others.explained is None else others.explained
    assert certified.explained is not None
    slots = (*certified.slots, *(replace(slot, example=number[slot.example]) for slot in searched.slots))
    return replace(
        searched,
        case=certified.case,
        x=torch.cat([certified.x, others.x]),
        y=torch.cat([certified.y, others.y]),
        confidence=torch.cat([certified.confidence, others.confidence]),
        explained=torch.cat([certified.explained, explained]),
        evidence=_join_evidence(certified, others),
        slots=tuple(sorted(slots, key=lambda slot: slot.round)),
        evaluations=certified.evaluations + searched.evaluations,
        seconds=certified.seconds + searched.seconds,
        route=f"{certified.route}; {searched.route}",
        oracles=tuple(dict.fromkeys((*certified.oracles, *searched.oracles))),
        notes=(*certified.notes, *searched.notes),
    )


def _join_evidence(*answers: Reconstruction) -> dict[str, tuple[float, ...]]:
    """Return the evidence on the examples of several answers, one after the other; NaN where an answer lacks a feature."""
    names = dict.fromkeys(name for answer in answers for name in answer.evidence)
    parts = {name: [answer.evidence.get(name, (float("nan"),) * len(answer.x)) for answer in answers] for name in names}
    return {name: tuple(chain.from_iterable(values)) for name, values in parts.items()}
