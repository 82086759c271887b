"""Clients that use the same examples in every round: their links, and labels from the mean of all rounds."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Generator, Tensor

from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.observed import read_labels
from attacker.attacks.labels.rules import LabelRule
from attacker.attacks.linking import Links
from attacker.attacks.simulation.client import build_network
from fedsim.recording.codec import encode


def link_same(sizes: Sequence[int], labels: Tensor | None = None, notes: tuple[str, ...] = ()) -> Links:
    """Return links that state that all rounds hold the same examples in the same order.

    sizes: number of examples of each round. labels: (N,) labels of the examples, or None. Raises ValueError if rounds
    have different numbers of examples.
    """
    if len(set(sizes)) != 1:
        raise ValueError(
            f"rounds hold from {min(sizes)} to {max(sizes)} examples, so they are not the same in all rounds; "
            "choose compare=features"
        )
    note = f"all {len(sizes)} rounds are assumed to hold the same examples" if len(sizes) > 1 else "one round"
    return Links((torch.arange(sizes[0]),) * len(sizes), torch.ones(sizes[0]), labels, notes=(*notes, note))


def read_shared_labels(case: Case, rule: LabelRule, rng: Generator, device: str, knows_defense: bool) -> Tensor:
    """Return the labels (N,) that a rule infers from the mean update of all rounds, at the weights of the first round.

    The mean has less noise than a single update, and has coordinates that were not sent in every round.
    """
    first, count = case.observations[0], len(case.observations)
    total = {name: torch.zeros_like(t) for name, t in first.update.items()}
    for observation in case.observations:
        total = {name: t + observation.update[name] / count for name, t in total.items()}
    mean = replace(first, payload=encode(total))
    model = build_network(first).to(device)
    seen = ObservedGradients([mean], model=model, device=device, knows_defense=knows_defense)
    return read_labels(rule, seen, 0, model, seed_generator(rng, case, "shared labels")).cpu()
