"""Nulls: attacks that get nothing from the clients but the numbers of their examples. They show what a prior alone achieves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from attacker.attacks.answers import build_reconstruction
from attacker.attacks.base import Attack, Effort, Measurable, Memory, Progress, estimate_effort
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.confidence import judge_prior
from attacker.attacks.linking import Links
from attacker.attacks.needs import Need
from attacker.reconstruction import Reconstruction
from fedsim.recording.codec import encode
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.observation import Observation


def blind_cases(cases: Sequence[Case]) -> list[Case]:
    """Return copies of the cases without what the clients sent: updates are zero, returned buffers and metrics are missing.

    Numbers of examples, which clients report, stay. True labels and logits, which no server knows, are removed. Model, weights
    and buffers that the server sent, training settings, names of defenses, clients, rounds, and links stay as well.
    """
    return [Case(tuple(_blind_observation(observation) for observation in case.observations), links=case.links) for case in cases]


@dataclass
class BlindedNull:
    """A wrapper of an attack's null that applies `blind_cases` to the cases before it calls the null."""

    attack: Attack

    @property
    def needs(self) -> frozenset[Need]:
        return self.attack.needs

    @property
    def effort(self) -> Effort:
        return estimate_effort(self.attack)

    @property
    def device(self) -> str:
        return self.attack.device

    @device.setter
    def device(self, device: str) -> None:
        self.attack.device = device

    def null(self) -> "BlindedNull":
        return self

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        return self.attack(blind_cases(cases), rng=rng, progress=progress, memory=memory)

    def time_evaluation(self, case: Case) -> float:
        """Return the seconds of one evaluation of the null, see `Measurable`. Raises ValueError if the null cannot measure it."""
        if not isinstance(self.attack, Measurable):
            raise ValueError("the time of an evaluation of this null is not known")
        return self.attack.time_evaluation(*blind_cases([case]))


@dataclass
class PriorNull:
    """A null that does not search: it answers each case by `build_prior_answer`. name, needs: those of its attack."""

    name: str
    needs: frozenset[Need]
    device: str = "cpu"

    def null(self) -> "PriorNull":
        return self

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        return [build_prior_answer(case, attack=self.name, rng=rng) for case in blind_cases(cases)]


@dataclass(kw_only=True)
class CaseByCase:
    """Base class of attacks that attack one case after the other, and whose null is a `PriorNull`."""

    name: str
    needs: frozenset[Need]
    device: str = "cpu"

    def null(self) -> PriorNull:
        return PriorNull(self.name, self.needs)

    def attack_case(self, case: Case, rng: Generator) -> Reconstruction:
        """Return the reconstruction of one case. Raises ValueError if it cannot be attacked."""
        raise NotImplementedError

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        reconstructions = []
        for i, case in enumerate(cases):
            reconstructions.append(self.attack_case(case, rng))
            if progress is not None:
                progress(i + 1, len(cases), f"{len(cases) - i - 1} left")
        return reconstructions


def build_prior_answer(case: Case, *, attack: str, rng: Generator, image: Tensor | None = None) -> Reconstruction:
    """Return the answer of a null that does not search: the same example for each reported one, at least one, with random labels.

    image: this example, (*shape); by default the value 0.5 everywhere. attack: name of the attack.
    """
    data = case.observations[0].data
    count = sum(observation.num_examples or 0 for observation in case.observations) or 1
    labels = torch.randint(data.num_classes, (count,), generator=seed_generator(rng, case, "labels"))
    example = torch.full(data.shape, 0.5) if image is None else image
    judged = judge_prior(count, data)
    return build_reconstruction(
        case,
        example.expand(count, *data.shape).clone(),
        labels,
        attack=attack,
        rng=rng,
        route="prior alone",
        loss=torch.ones(1),
        confidence=judged.confidence,
        explained=judged.explained,
    )


def _blind_observation(observation: Observation) -> Observation:
    nothing = {name: torch.zeros_like(w) for name, w in observation.weights.items()}
    return replace(observation, payload=encode(nothing), buffers_after={}, metrics={})


def link_by_sizes(observations: Sequence[Observation]) -> Links:
    """Return which positions of a client's observations are assumed to hold the same example, from the numbers of examples alone.

    A client that trains for whole epochs is assumed to use its examples in the same order in every round. For a client that takes
    one step per round, a batch with fewer examples than the prescribed batch size ends an epoch, and the next round starts again
    at the first example. In all other cases, and in secure sums whose cohort changes, no two positions are linked. Observations
    that do not report a number of examples have no positions, and with one step per round they count as the end of an epoch.
    Raises ValueError if no observation reports a number above 0.
    """
    training, start = observations[0].training, 0
    changing = observations[0].client == SUM_CLIENT and len({observation.cohort for observation in observations}) > 1
    places = []
    for observation in observations:
        size = observation.num_examples or 0
        places.append(torch.arange(start, start + size))
        ends = training.epochs is not None or (training.steps == 1 and size < training.step_size)
        start = 0 if ends and not changing else start + size
    return Links(tuple(places), torch.ones(1 + max(int(place.max()) for place in places if len(place))))
