"""Descriptions of a client's rounds for linking: labels, and features from the gradient or images from a first reconstruction."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from attacker.attacks.base import Memory, Progress
from attacker.attacks.cases import Case
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.observed import MAX_MISFIT, read_features, read_labels
from attacker.attacks.labels.probes import compute_head_inputs, draw_inputs
from attacker.attacks.labels.rules import infer_from_bias, infer_labels
from attacker.attacks.linking import HeadFeatures, RoundDescription
from attacker.attacks.linking.features import EXACT_MISFIT
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.matching_run import MatchingRun
from attacker.attacks.matching.polishing import polish
from attacker.attacks.matching.saved_state import prefix_memory
from attacker.attacks.simulation.client import build_network
from fedsim import models

REFERENCE_INPUTS = 32
"""Number of random inputs whose features, at the weights of a round, make the features of different rounds comparable."""


@dataclass(frozen=True)
class Describer:
    """A callable that describes the rounds of a client for linking.

    matching: the search whose label rule is used, and which makes first reconstructions. compare, pre_steps: as in `Agic`.
    """

    matching: GradientMatching
    compare: str
    pre_steps: int
    device: str

    def __call__(self, case: Case, rng: Generator, progress: Progress | None, memory: Memory | None) -> list[RoundDescription]:
        """Return one description for each observation of a case, in order.

        All descriptions hold features if `compare` is "features" and the features of every observation can be used. Otherwise all
        hold images.
        """
        knows = self.matching.simulation.knows_defense
        model = build_network(case.observations[0]).to(self.device)
        probes = draw_inputs(case.observations[0].data, REFERENCE_INPUTS, rng).to(self.device)
        counts = [observation.num_examples or 0 for observation in case.observations]
        known = [None] * len(counts) if case.known_labels is None else list(torch.split(case.known_labels, counts))
        described = []
        for observation, labels in zip(case.observations, known, strict=True):  # one at a time, as each is as large as the model
            seen = ObservedGradients([observation], model=model, device=self.device, knows_defense=knows)
            description = self._solve_exactly(observation.round, seen, probes, rng) if labels is None else None
            if description is None:
                description = RoundDescription(observation.round, self._infer_labels(seen, rng) if labels is None else labels)
                description = self._add_features(description, seen, probes, rng, known=labels is not None)
            described.append(description)
        if self.compare == "features" and all(each.usable for each in described):
            return described
        return self._add_images(case, described, rng, progress, memory)

    def _solve_exactly(self, number: int, observed: ObservedGradients, probes: Tensor, rng: Generator) -> RoundDescription | None:
        """Return the description of round `number` if the labels read off the last bias give features that explain the gradient.

        The last layer's gradient must be explained exactly. This avoids the search for labels, which costs more than features and
        linking together. With fewer than `classes - 1` examples, the gradient has more entries than the features have unknowns,
        so that wrong labels leave a misfit.
        Returns None if there is a misfit, if the round has one example or at least `classes - 1`, if the last layer has no bias,
        if the attacker knows that the update is defended, if the label rule is not the default, or if features are not compared.
        """
        head, bias = models.find_head(observed.model, observed.data)
        classes = len(dict(observed.model.named_parameters())[head])
        if self.compare != "features" or self.matching.labels.rule is not infer_labels or bias is None or observed.defended:
            return None
        if not 1 < observed.count < classes - 1:
            return None
        guess = RoundDescription(number, read_labels(infer_from_bias, observed, 0, observed.model, rng).cpu())
        features = read_features(observed, guess.labels, rng, known=True)
        return None if features.misfit > EXACT_MISFIT else self._describe(guess, features, observed, probes)

    def _infer_labels(self, observed: ObservedGradients, rng: Generator) -> Tensor:
        assert self.matching.labels.rule is not None
        return read_labels(self.matching.labels.rule, observed, 0, observed.model, rng).cpu()

    def _add_features(
        self, description: RoundDescription, observed: ObservedGradients, probes: Tensor, rng: Generator, *, known: bool
    ) -> RoundDescription:
        """Return the description with features, inputs of the last layer computed from its gradient, and with corrected labels.

        The description is returned unchanged if features are not compared, or if the gradient of the features differs from the
        observed one by more than MAX_MISFIT of its norm.
        probes: random inputs of the attacker, see `_describe`. known: whether the labels are certain, so that they are not
        corrected.
        """
        if self.compare != "features":
            return description
        features = read_features(observed, description.labels, rng, known=known)
        return description if features.misfit > MAX_MISFIT else self._describe(description, features, observed, probes)

    def _describe(
        self, description: RoundDescription, features: HeadFeatures, observed: ObservedGradients, probes: Tensor
    ) -> RoundDescription:
        """Return the description with the features found, their labels, and the features of the random inputs `probes`.

        The features of `probes` are stored as `RoundDescription.reference`, by which features of different rounds are made
        comparable.
        """
        row = observed.get_state(0)
        with torch.no_grad():
            reference, _ = compute_head_inputs(
                observed.model, observed.data, {**row["buffers"], **row["weights"]}, observed.data.normalise(probes)
            )
        return description._replace(features=features.features.float(), labels=features.labels, reference=reference.cpu().float())

    def _add_images(
        self, case: Case, described: Sequence[RoundDescription], rng: Generator, progress: Progress | None, memory: Memory | None
    ) -> list[RoundDescription]:
        """Return the descriptions with images in place of features, one search per round (AGIC, section IV-B, step 1).

        Raises KeyboardInterrupt if the user interrupts a reconstruction.
        """
        search = self.matching.copy_with(steps=self.pre_steps, restarts=1, device=self.device)
        with_images = []
        for description, observation in zip(described, case.observations, strict=True):
            alone = Case((observation,), known_labels=description.labels)
            run = MatchingRun(search, [alone], rng, progress, prefix_memory(memory, f"{description.round}/"))
            run.search()
            polish(run)
            if run.interrupted:
                raise KeyboardInterrupt
            with_images.append(description._replace(features=None, reference=None, images=run.decode_best(0).clamp(0, 1)))
        return with_images
