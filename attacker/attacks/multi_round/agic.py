"""AGIC: a gradient matching attack that uses many rounds of a client together (Xu et al. 2022)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Annotated, Literal, get_args

import torch
from torch import Generator

from attacker.attacks.arguments import OneOf
from attacker.attacks.base import Case, Effort, Memory, Need, Progress, estimate_effort, seed_generator
from attacker.attacks.closed_form.observations import observe
from attacker.attacks.labels import rules as labels
from attacker.attacks.linking import Links, build_unlinked, link
from attacker.attacks.matching import names as named
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.initialisation import get_start, normal_after_normalisation
from attacker.attacks.matching.layer_weights import DEPTH_SHAPES, weigh_by_depth
from attacker.attacks.matching.objectives import Objective
from attacker.attacks.matching.parametrisation import Parametrisation
from attacker.attacks.matching.parts import Labels, Search
from attacker.attacks.matching.priors import Prior
from attacker.attacks.matching.saved_state import prefix_memory
from attacker.attacks.matching.simulation import LocalSteps, Simulation
from attacker.attacks.multi_round.descriptions import Describer
from attacker.attacks.multi_round.merging import merge
from attacker.attacks.nulls import blind_cases, link_by_sizes
from attacker.attacks.optimisers.descent import PLATEAU_STOP, Stop
from attacker.attacks.optimisers.first_order import Adam
from attacker.reconstruction import Reconstruction
from fedsim.recording.observation import Observation

ComparedBy = Literal["features", "images", "published", "none"]
COMPARISONS: tuple[ComparedBy, ...] = get_args(ComparedBy)


@dataclass(kw_only=True)
class Agic:
    """An attack that links the rounds of a client, and then reconstructs its examples from all rounds at once.

    Links say which slots of different rounds hold the same example. Candidates that were not linked but turn out to be the same
    example are merged at the end.

    matching:  the joint search over all rounds.
    compare:   how examples of different rounds are compared. "features": by the features computed from the last layer's gradient.
               "images": each round is first reconstructed separately, and images are matched by a global assignment.
               "published": the same with greedy matching among batches that share labels, as in the paper. "none": no links.
    pre_steps: iterations of the separate reconstructions.
    sees_gradient: False gives the null, which uses the prior alone and links only by reported numbers of examples, see
               `link_by_sizes`.
    """

    name: str
    matching: GradientMatching
    compare: ComparedBy
    pre_steps: int
    knows_defense: bool = True
    sees_gradient: bool = True
    needs: frozenset[Need] = field(default=frozenset({Need.SAME_CLIENT, Need.NUM_EXAMPLES, Need.LINEAR_HEAD}))
    device: str = "cpu"

    @property
    def effort(self) -> Effort:
        return estimate_effort(self.matching)

    def null(self) -> "Agic":
        return replace(self, sees_gradient=False)

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Attack `cases`, each of one client, which must agree in model, data, training settings and defense.

        Ctrl-C while rounds are linked raises KeyboardInterrupt. Later, cases whose search has not begun are left out.
        """
        joint = replace(self.matching, sees_gradient=self.sees_gradient, device=self.device)
        if self.sees_gradient:
            linked = [self._link(case, rng, progress, memory) for case in cases]
        else:
            linked = [_hide_gradient(case) for case in blind_cases(cases)]
        found: dict[str, Reconstruction] = {}
        for group, alike in _group_alike(linked):
            own = prefix_memory(memory, f"joint {group}/")
            answers = joint(alike, rng=rng, progress=progress, memory=own)
            found |= {case.key: one for case, one in zip(alike, answers, strict=True)}
            if any(one.interrupted for one in answers):
                break
        asked_for = [(asked, case) for asked, case in zip(cases, linked, strict=True) if case.key in found]
        return [replace(self._merge(asked, case, found[case.key]), case=asked.key) for asked, case in asked_for]

    def _merge(self, asked: Case, linked: Case, found: Reconstruction) -> Reconstruction:
        """Merge candidates of different rounds that turn out to be the same example, unless the caller gave the links.

        asked: the case as given. linked: the case with the links that were used.
        """
        if not self.sees_gradient or asked.links is not None or len(linked.observations) == 1:
            return found
        missed = {}
        for observation in linked.observations:
            rows = [slot.example for slot in found.slots if slot.round == observation.round]
            rows = list(dict.fromkeys(rows))  # each example once, also with several local epochs
            seen = observe([Case((observation,))], knows_defense=self.knows_defense, device=self.device)
            missed[observation.round] = seen.measure_misfit(0, found.x[rows].to(self.device), found.y[rows].to(self.device))
        return merge(found, missed)

    def _link(self, case: Case, rng: Generator, progress: Progress | None, memory: Memory | None) -> Case:
        """Return the case with links, and without unusable observations, such as updates of zeros."""
        case, left_out = _drop_unusable(case)
        if case.links is not None:
            return case
        sizes = [observation.num_examples or 0 for observation in case.observations]
        if self.compare == "none" or len(sizes) == 1:
            return replace(case, links=build_unlinked(sizes, left_out))
        describer = Describer(self.matching, self.compare, self.pre_steps, self.device)
        own = prefix_memory(memory, f"before/{case.key}/")
        described = describer(case, seed_generator(rng, case, "linking"), progress, own)
        training = case.observations[0].training
        links = link(
            described,
            batch_size=training.batch_size,
            matching="greedy" if self.compare == "published" else "assignment",
            rule="lists" if self.compare == "published" else "own",
            whole_passes=training.epochs is not None,
        )
        return replace(case, links=replace(links, notes=(*left_out, *links.notes)))


def agic(
    *,
    steps: int = 2000,
    beta: float = 50.0,
    shape: Annotated[str, OneOf(tuple(DEPTH_SHAPES))] = "linear",
    relu_modifier: bool = True,
    tv: float = 1e-4,
    distance: Annotated[str, OneOf(tuple(named.DISTANCES))] = "cosine",
    optimiser: Annotated[str, OneOf(tuple(named.OPTIMISERS))] = "adam",
    learning_rate: float = 0.0,
    signed: bool = True,
    label_rule: Annotated[str, OneOf(tuple(labels.LABEL_RULES))] = "inferred",
    local_steps: LocalSteps = "one_batch",
    surrogate: bool = False,
    order_invariant: float = 0.0,
    compare: Annotated[str, OneOf(COMPARISONS)] = "features",
    pre_steps: int = 200,
    later: float = 0.1,
    robust: float = 0.0,
    coarse: float = 0.0,
    compiled: bool = False,
    restarts: int = 1,
    knows_defense: bool = True,
) -> Agic:
    """Link all rounds of a client and match their gradients by a layer-weighted cosine (Xu et al. 2022, AGIC, eqs. 2 to 8).

    beta, shape, relu_modifier: layer weights, see `weigh_by_depth`. beta is 50 for an untrained network, 2 for a trained one.
    tv: weight of the total variation, as in `cpl`. If the noise variance is known and distance is euclidean, more is added, as in
    `cpl` with denoised.
    distance, optimiser: by name, as in `cpl`. With another optimiser than adam, starts and stopping are those of `cpl`; lbfgs or
    wolfe with euclidean suit small sigmoid networks. learning_rate: 0 for the optimiser's default. signed: adam uses only the
    sign of the gradient.
    label_rule: as in `cpl`, but not joint.
    local_steps: one_batch treats all local steps as one, simulated simulates each. surrogate: compute that one step at weights
    between those sent and those returned, at an optimised position (SME).
    order_invariant: weight of the prior that couples simulated local epochs (Dimitrov et al. 2022).
    compare: how rounds are linked: features, images, published (greedy) or none, see `Agic`. pre_steps: iterations of separate
    reconstructions for images and published.
    later: weight of observations after the first epoch. robust: distance from which a round has less weight. See `Objective`.
    coarse: share of the steps, at the beginning, in bfloat16 if the device supports it: faster, but recovers slightly less.
    compiled: as in `dlg`.
    """
    if compare not in COMPARISONS:
        raise ValueError(f"unknown comparison {compare!r}. Known: {', '.join(COMPARISONS)}")
    rule, adam = labels.get_label_rule(label_rule), optimiser == "adam"
    if rule is None:
        raise ValueError(
            "label_rule cannot be 'joint', since rounds are linked by labels that are known before the search; choose one of "
            f"{', '.join(labels.LABEL_RULES)}"
        )
    needs = {Need.SAME_CLIENT, Need.NUM_EXAMPLES, Need.LINEAR_HEAD} | ({Need.IMAGE_PRIOR} if tv else set())
    chosen = Adam(learning_rate=learning_rate or 0.1, signed=signed) if adam else named.get_optimiser(optimiser, learning_rate)
    matching = GradientMatching(
        name="agic",
        objective=Objective(
            distance=named.get_distance(distance),
            layers=weigh_by_depth(beta, shape, relu_modifier=relu_modifier),
            robust=robust,
            later=later,
        ),
        simulation=Simulation(
            local_steps=named.check_local_steps(local_steps),
            surrogate=surrogate,
            order_invariant=order_invariant,
            knows_defense=knows_defense,
        ),
        parametrisation=Parametrisation(init=normal_after_normalisation if adam else get_start("patterned"), boxed=adam),
        prior=Prior(tv=tv, denoised=True),
        labels=Labels(rule=rule),
        search=Search(
            optimiser=chosen,
            steps=steps,
            stop=Stop(patience=steps, decrease=0.0) if adam else PLATEAU_STOP,
            restarts=restarts,
            coarse=coarse,
            compiled=compiled,
        ),
        needs=frozenset(needs - {Need.SAME_CLIENT} | {Need.ONE_OBSERVATION}),
    )
    return Agic(
        name="agic",
        matching=matching,
        compare=compare,
        pre_steps=pre_steps,
        knows_defense=knows_defense,
        needs=frozenset(needs),
    )


def agic_of_one_round(*, steps: int = 2000, restarts: int = 1, knows_defense: bool = True) -> GradientMatching:
    """Return AGIC's search for the examples of a single round, without linking."""
    return agic(steps=steps, restarts=restarts, knows_defense=knows_defense).matching


def _drop_unusable(case: Case) -> tuple[Case, tuple[str, ...]]:
    """Return the case without unusable observations, and notes on those. Raises ValueError if no observation is usable."""
    problems = [_find_problem(observation) for observation in case.observations]
    if not any(problems):
        return case, ()
    if all(problems):
        raise ValueError(f"no round can be used: {'; '.join(dict.fromkeys(problems))}")
    if case.links is not None:
        raise ValueError(f"links include rounds that cannot be used; leave them out: {'; '.join(filter(None, problems))}")
    kept = tuple(o for o, problem in zip(case.observations, problems, strict=True) if not problem)
    known = case.known_labels
    if known is not None:
        each = torch.split(known, [observation.num_examples or 0 for observation in case.observations])
        known = torch.cat([own for own, problem in zip(each, problems, strict=True) if not problem])
    said = tuple(f"round {o.round}: {why}; left out" for o, why in zip(case.observations, problems, strict=True) if why)
    return Case(kept, known), said


def _hide_gradient(case: Case) -> Case:
    """Return the case as a null may know it: linked by the numbers of examples, without rounds that report no examples."""
    if case.links is not None:
        return case
    kept = [observation for observation in case.observations if observation.num_examples]
    if not kept:
        raise ValueError(f"no round can be used: {_find_problem(case.observations[0])}")
    return Case(tuple(kept), links=link_by_sizes(kept))


def _find_problem(observation: Observation) -> str:
    """Return why an observation cannot be used; "" if it can."""
    if not observation.num_examples:
        return f"the client reported {'no number of' if observation.num_examples is None else 0} examples"
    if not all(bool(t.isfinite().all()) for t in observation.update.values()):
        return "its update contains NaN or infinite values"
    if not any(bool(t.any()) for t in observation.update.values()):
        return "its update is all zeros"
    return ""


def _group_alike(cases: Sequence[Case]) -> Iterator[tuple[int, list[Case]]]:
    """Yield numbered groups of cases that can be searched in one batch: with equal numbers of examples in every round."""

    def get_structure(case: Case) -> tuple[int, ...]:
        links: Links | None = case.links
        assert links is not None
        return links.examples, *links.sizes

    for number, (_, group) in enumerate(groupby(sorted(cases, key=get_structure), key=get_structure)):
        yield number, list(group)
