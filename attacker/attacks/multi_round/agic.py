"""AGIC: a gradient matching attack that uses many rounds of a client together (Xu et al. 2022)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Literal

import torch
from torch import Generator

from attacker.attacks.base import Effort, Memory, Progress, estimate_effort
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.closed_form.observations import observe
from attacker.attacks.linking import Links, RoundDescription, build_unlinked, describe_gaps, link
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.saved_state import prefix_memory
from attacker.attacks.multi_round.certified_examples import CertifiedExamples, certify_rounds
from attacker.attacks.multi_round.descriptions import Describer
from attacker.attacks.multi_round.merging import merge
from attacker.attacks.multi_round.reduced_search import (
    ReducedSearch,
    explain_rounds,
    find_known_examples,
    has_earlier_search,
    join_answers,
    mark_notes,
    select_rounds,
)
from attacker.attacks.multi_round.refinement import refine
from attacker.attacks.multi_round.round_by_round import has_unknown_orders, search_round_by_round
from attacker.attacks.multi_round.usable_rounds import drop_unusable, link_for_null, link_same, read_shared_labels
from attacker.attacks.needs import Need
from attacker.attacks.nulls import blind_cases
from attacker.attacks.simulation.client import build_channel, build_network, find_schedule
from attacker.reconstruction import Reconstruction, Slot
from fedsim.recording.masked_vectors import SUM_CLIENT

ComparedBy = Literal["features", "images", "published", "same", "none"]


@dataclass(frozen=True)
class _Plan:
    """The plan for a case: which rounds are searched, and which examples closed forms have certified.

    usable:  the case without rounds that no attack can use, see `find_problem`.
    reduced: the rounds that are left to the search, see `ReducedSearch`; its field `case` is None if there are none.
    known:   examples that closed forms certify, see `Agic`; None if they certify none or are not tried.
    """

    usable: Case
    reduced: ReducedSearch
    known: CertifiedExamples | None = None


@dataclass(kw_only=True)
class Agic:
    """An attack that links the rounds of a client, and then reconstructs its examples from all rounds at once.

    Rounds with several local batches, whose order of examples is unknown, are searched one by one first, see
    `search_round_by_round`.

    Closed forms are tried on single rounds first. A closed form certifies the examples of a round if they explain its gradient
    exactly and the gradient alone determines them, see `ClosedForm.certify`. Rounds that certified examples explain are not
    searched.
    Links state which positions in the batches of different rounds hold the same example. Candidates that were not linked but turn
    out to be the same example are merged at the end.

    matching:  the joint search over all rounds.
    compare:   how examples of different rounds are compared. "features": by the inputs of the last layer, computed from the
               layer's gradient; if the features of a round cannot be computed, all rounds are compared by images. Clients that
               take several local steps in whole epochs on equally many examples are taken for "same".
               "images": each round is first reconstructed separately, and the images of each pass over the data are assigned to
               the examples of earlier passes so that the sum of the distances is smallest. "published": as "images", but pairs
               are matched greedily, among batches that share labels, as in the paper.
               "same": not at all, since the client uses all its examples in every round. "none": no links.
    pre_steps: iterations of the separate reconstructions.
    closed_forms: whether closed forms are tried first. Even if true, they are skipped for a case with given links, and if the
               search simulates a state of the defense, for which it needs all rounds.
    refined: whether Gauss-Newton steps refine the search's answer, if the defense keeps a state between rounds and the search
               simulates it, see `refine`.
    knows_defense: whether closed forms and links take the defense into account; `matching` has a setting of its own.
    sees_gradient: False gives the null, the same attack without the gradient: it uses the prior alone, and links only by reported
               numbers of examples, see `link_for_null`.
    """

    name: str
    matching: GradientMatching
    compare: ComparedBy
    pre_steps: int
    closed_forms: bool = True
    refined: bool = False
    knows_defense: bool = True
    sees_gradient: bool = True
    needs: frozenset[Need] = field(default=frozenset({Need.SAME_CLIENT, Need.NUM_EXAMPLES, Need.LINEAR_HEAD}))
    device: str = "cpu"

    @property
    def effort(self) -> Effort:
        return estimate_effort(self.matching if self.sees_gradient else self.matching.null())

    def null(self) -> "Agic":
        return replace(self, sees_gradient=False)

    def time_evaluation(self, case: Case) -> float:
        """Return the seconds of one evaluation of the joint search, see `Measurable`."""
        return replace(self.matching, sees_gradient=self.sees_gradient, device=self.device).time_evaluation(case)

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Return one reconstruction for each of `cases`, each of one client; they agree in model, data, training and defense.

        Ctrl-C before the search raises KeyboardInterrupt. During the search, Ctrl-C ends it: cases whose search had begun are
        returned with their best results so far, cases whose search had not begun are missing in the returned list, and cases that
        need no search are returned.
        """
        if self.closed_forms and has_earlier_search(memory):
            return replace(self, closed_forms=False)(cases, rng=rng, progress=progress, memory=memory)
        if self.sees_gradient:
            plans = [self._plan(case, rng, progress, memory) for case in cases]
        else:
            plans = [_plan_search(link_for_null(case, same=self.compare == "same")) for case in blind_cases(cases)]
        held = {
            key: examples for plan in plans if plan.known is not None for key, examples in plan.reduced.hold(plan.known).items()
        }
        joint = replace(self.matching, sees_gradient=self.sees_gradient, device=self.device, held=held)
        searched: dict[str, Reconstruction] = {}
        for group, similar_cases in _group_alike([plan.reduced.case for plan in plans if plan.reduced.case is not None]):
            group_memory = prefix_memory(memory, f"{'remaining' if self.closed_forms else 'joint'} {group}/")
            unknown = all(has_unknown_orders(joint, case) for case in similar_cases)
            attack = partial(search_round_by_round, joint) if unknown else joint
            answers = attack(similar_cases, rng=rng, progress=progress, memory=group_memory)
            searched |= {
                case.key: self._refine(case, answer, progress) for case, answer in zip(similar_cases, answers, strict=True)
            }
            if any(searched[case.key].interrupted for case in similar_cases):
                break
        return [
            self._finish(case, plan, None if (search := plan.reduced.case) is None else searched[search.key], rng)
            for case, plan in zip(cases, plans, strict=True)
            if plan.reduced.case is None or plan.reduced.case.key in searched
        ]

    def _plan(self, case: Case, rng: Generator, progress: Progress | None, memory: Memory | None) -> _Plan:
        """Return the plan for a case: the examples that closed forms certify, and the rounds that are left to the search.

        The rounds that are left have links, which state the positions of their batches that hold the same example.
        """
        usable, left_out = drop_unusable(case)
        knows, device = self.knows_defense, self.device
        known = certify_rounds(usable, rng, knows, device, progress) if self._tries_closed_forms(usable) else None
        if known is None:
            return _plan_search(self._link(usable, left_out, rng, progress, memory)[0])
        notes = (*left_out, *describe_gaps(usable.rounds))
        left, slots = select_rounds(usable, set(usable.rounds) - set(known.routes)), tuple[Slot, ...]()
        if left is not None and (self.compare == "same" or self._uses_all_examples(left)):
            left, slots = explain_rounds(left, known, knows, device)
        if left is None:
            return _Plan(usable, ReducedSearch(None, torch.empty(0, dtype=torch.int64), slots, notes), known)
        linked, described = self._link(left, (), rng, progress, memory, describe_all=True)
        reduced = find_known_examples(mark_notes(linked), described, known, knows, device)
        return _Plan(usable, replace(reduced, slots=(*slots, *reduced.slots), notes=notes), known)

    def _refine(self, case: Case, answer: Reconstruction, progress: Progress | None) -> Reconstruction:
        """Return the answer after Gauss-Newton steps; unchanged for a null, and if no state of a defense is simulated."""
        if not (self.refined and self.sees_gradient and self._simulates_state(case)) or answer.interrupted:
            return answer
        return refine(case, answer, device=self.device, progress=progress)

    def _tries_closed_forms(self, case: Case) -> bool:
        """Return whether closed forms are tried: not for given links, nor if the search simulates the defense's state."""
        if not self.closed_forms or case.links is not None:
            return False
        return not self._simulates_state(case)

    def _simulates_state(self, case: Case) -> bool:
        channel = build_channel(case.observations[0], build_network(case.observations[0]))
        return channel.follow is not None and self.knows_defense and self.matching.simulation.in_order

    def _finish(self, case: Case, plan: _Plan, searched: Reconstruction | None, rng: Generator) -> Reconstruction:
        """Return the certified and the searched examples, merged by `_merge`. searched: None if no round was searched."""
        if plan.known is None:
            assert searched is not None
            return replace(self._merge(case, plan.usable, searched), case=case.key)
        answer = join_answers(case, plan.known, plan.reduced, searched, attack=self.name, seed=rng.initial_seed())
        return answer if searched is None else self._merge(case, plan.usable, answer, different=len(plan.known.x))

    def _merge(self, case: Case, linked: Case, answer: Reconstruction, *, different: int = 0) -> Reconstruction:
        """Return the answer with candidates of different rounds merged that turn out to be the same example.

        `answer` itself is returned for a null, for a single round, and if the caller stated which positions of different rounds
        hold the same example (links).
        case: the case as given. linked: the case with the rounds that were used. different: number of first candidates that
        are known to be different examples.
        """
        if not self.sees_gradient or case.links is not None or len(linked.observations) == 1:
            return answer
        missed = {}
        for observation in linked.observations:
            rows = list(dict.fromkeys(slot.example for slot in answer.slots if slot.round == observation.round))
            seen = observe([Case((observation,))], knows_defense=self.knows_defense, device=self.device)
            missed[observation.round] = seen.measure_misfit(0, answer.x[rows].to(self.device), answer.y[rows].to(self.device))
        return merge(answer, missed, different=different)

    def _uses_all_examples(self, case: Case) -> bool:
        """Return whether the rounds are taken to hold the same examples, since features of them cannot be computed.

        They are if features are to be compared, and the client takes several local steps per round, trains for whole epochs and
        reports equally many examples in every round.
        """
        first, counts = case.observations[0], {observation.num_examples for observation in case.observations}
        whole = self.compare == "features" and first.training.epochs is not None and len(counts) == 1 < len(case.observations)
        return whole and first.client != SUM_CLIENT and find_schedule(first)[1] > 1

    def _link(
        self,
        case: Case,
        left_out: tuple[str, ...],
        rng: Generator,
        progress: Progress | None,
        memory: Memory | None,
        *,
        describe_all: bool = False,
    ) -> tuple[Case, Sequence[RoundDescription]]:
        """Return the case with links, and the descriptions of its rounds by which they were found.

        Links state which batch positions of different rounds hold the same example. A description holds the labels of a round's
        examples, with features or images; the sequence is empty if none was needed.
        left_out: notes on rounds that are left out. describe_all: if rounds are compared by features, whether to describe even a
        single round, which needs no links.
        """
        if case.links is not None:
            return case, ()
        sizes = [observation.num_examples or 0 for observation in case.observations]
        if self.compare == "same" or self._uses_all_examples(case):
            assert self.matching.labels.rule is not None
            rule, knows = self.matching.labels.rule, self.knows_defense
            labels = None if case.known_labels is not None else read_shared_labels(case, rule, rng, self.device, knows)
            return replace(case, links=link_same(sizes, labels, left_out)), ()
        if self.compare == "none" or (len(sizes) == 1 and not (describe_all and self.compare == "features")):
            return replace(case, links=build_unlinked(sizes, left_out)), ()
        describer = Describer(self.matching, self.compare, self.pre_steps, self.device)
        own = prefix_memory(memory, f"before/{case.key}/")
        described = describer(case, seed_generator(rng, case, "linking"), progress, own)
        training = case.observations[0].training
        links = link(
            described,
            batch_size=training.step_size,
            matching="greedy" if self.compare == "published" else "assignment",
            rule="lists" if self.compare == "published" else "own",
            whole_passes=training.epochs is not None,
        )
        return replace(case, links=replace(links, notes=(*left_out, *links.notes))), described


def _plan_search(linked: Case) -> _Plan:
    """Return the plan to search for all examples of a case, none of which is known. linked: a case that has links."""
    assert linked.links is not None
    return _Plan(linked, ReducedSearch(linked, torch.full((linked.links.examples,), -1)))


def _group_alike(cases: Sequence[Case]) -> Iterator[tuple[int, list[Case]]]:
    """Yield groups of cases that can be searched in one batch, each as a pair of its number, from 0, and its cases.

    Cases of a group have equally many rounds, the same number of examples in each, and equally many different examples.
    """

    def get_structure(case: Case) -> tuple[int, ...]:
        links: Links | None = case.links
        assert links is not None
        return links.examples, *links.sizes

    for number, (_, group) in enumerate(groupby(sorted(cases, key=get_structure), key=get_structure)):
        yield number, list(group)
