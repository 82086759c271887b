"""What linking is told of each round of a client, read off its gradient or out of a first reconstruction."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from attacker.attacks.base import Case, Memory, Progress
from attacker.attacks.labels.observed import MISFIT, read_features, read_labels
from attacker.attacks.labels.probes import head_inputs, random_inputs
from attacker.attacks.linking import Described
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.problem import View
from attacker.attacks.matching.saved_state import within
from attacker.attacks.simulation.client import network_of

REFERENCE = 32
"""Inputs of the attacker's own whose features every round's are measured against."""


@dataclass(frozen=True)
class Describer:
    """matching: the search whose labels and first reconstructions are asked for. compare, pre_steps: as in `Agic`."""

    matching: GradientMatching
    compare: str
    pre_steps: int
    device: str

    def __call__(self, case: Case, rng: Generator, progress: Progress | None, memory: Memory | None) -> list[Described]:
        """One description for each observation of a case, in order."""
        matching = replace(self.matching, device=self.device)
        model = network_of(case.observations[0]).to(self.device)
        probes = random_inputs(case.observations[0].data, REFERENCE, rng).to(self.device)
        counts = [observation.num_examples or 0 for observation in case.observations]
        known = [None] * len(counts) if case.known_labels is None else list(torch.split(case.known_labels, counts))
        described = []
        for observation, labels in zip(case.observations, known, strict=True):  # one at a time: a view is as large as the model
            count = observation.num_examples or 0
            view = View(matching, model, [observation], torch.arange(count)[None], torch.ones(1), count)
            one = Described(observation.round, self._labels(view, rng) if labels is None else labels)
            described.append(self._features(one, view, probes, rng, known=labels is not None))
        if self.compare == "features" and all(one.usable for one in described):
            return described
        return self._images(case, described, rng, progress, memory)

    def _labels(self, view: View, rng: Generator) -> Tensor:
        assert self.matching.labels is not None
        return read_labels(self.matching.labels, view, 0, view.model, rng).cpu()

    def _features(self, one: Described, view: View, probes: Tensor, rng: Generator, *, known: bool) -> Described:
        """With the features behind the head's gradient, and with labels as they fit them best; as it was where they do not."""
        if self.compare != "features":
            return one
        found = read_features(view, one.labels, rng, known=known)
        if found.misfit > MISFIT:
            return one
        row = view.case(0)
        with torch.no_grad():
            reference, _ = head_inputs(view.model, {**row["buffers"], **row["weights"]}, view.data.normalise(probes))
        return one._replace(features=found.features.float(), labels=found.labels, reference=reference.cpu().float())

    def _images(
        self, case: Case, described: Sequence[Described], rng: Generator, progress: Progress | None, memory: Memory | None
    ) -> list[Described]:
        """With a first reconstruction of each round alone (AGIC, IV-B, step 1). Raises KeyboardInterrupt if one was cut off."""
        search = replace(self.matching, steps=self.pre_steps, restarts=1, device=self.device)
        found = []
        for one, observation in zip(described, case.observations, strict=True):
            alone = Case((observation,), known_labels=one.labels)
            (guess,) = search([alone], rng=rng, progress=progress, memory=within(memory, f"{one.round}/"))
            if guess.interrupted:
                raise KeyboardInterrupt
            found.append(one._replace(features=None, reference=None, images=guess.x.clamp(0, 1)))
        return found
