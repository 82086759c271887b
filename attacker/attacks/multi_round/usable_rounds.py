"""Rounds that no attack can use, and rounds that hold the same examples: their links, and labels from the mean of all rounds.

Links state which batch positions of different rounds hold the same example.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Generator, Tensor

from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.observed import read_labels
from attacker.attacks.labels.rules import LabelRule
from attacker.attacks.linking import Links
from attacker.attacks.nulls import link_by_sizes
from attacker.attacks.simulation.client import build_network
from fedsim.recording.codec import encode
from fedsim.recording.observation import Observation


def drop_unusable(case: Case) -> tuple[Case, tuple[str, ...]]:
    """Return the case without unusable observations (`find_problem`), and one note on each unusable observation.

    If an observation is left out, its known labels are left out as well, and known logits are dropped.
    Raises ValueError if no observation is usable, or if the case has links and one of its observations is not usable.
    """
    problems = [find_problem(observation) for observation in case.observations]
    if not any(problems):
        return case, ()
    if all(problems):
        raise ValueError(f"no round can be used: {'; '.join(dict.fromkeys(problems))}")
    if case.links is not None:
        unusable = "; ".join(
            f"round {o.round}: {problem}" for o, problem in zip(case.observations, problems, strict=True) if problem
        )
        raise ValueError(
            f"Case.links covers rounds that cannot be attacked; leave these rounds out of the case and of its links: {unusable}"
        )
    usable = tuple(o for o, problem in zip(case.observations, problems, strict=True) if not problem)
    labels = case.known_labels
    if labels is not None:
        labels_by_round = torch.split(labels, [observation.num_examples or 0 for observation in case.observations])
        labels = torch.cat([part for part, problem in zip(labels_by_round, problems, strict=True) if not problem])
    notes = tuple(f"round {o.round}: {why}; left out" for o, why in zip(case.observations, problems, strict=True) if why)
    return Case(usable, labels), notes


def find_problem(observation: Observation) -> str:
    """Return why an observation cannot be used (no reported examples, or an update of zeros, NaN or infinities); "" if it can."""
    if not observation.num_examples:
        return f"the client reported {'no number of' if observation.num_examples is None else 0} examples"
    if not all(bool(t.isfinite().all()) for t in observation.update.values()):
        return "its update contains NaN or infinite values"
    if not any(bool(t.any()) for t in observation.update.values()):
        return "its update is all zeros"
    return ""


def link_for_null(case: Case, *, same: bool) -> Case:
    """Return the case with links for the null, the attack without the gradient, and without rounds that report no examples.

    The links follow from the reported numbers of examples alone. A case that has links is returned unchanged.
    same: whether the client is assumed to use the same examples in every round (`link_same`); otherwise `link_by_sizes` decides.
    Raises ValueError if no round reports examples, or if `same` is set and rounds report different numbers.
    """
    if case.links is not None:
        return case
    kept = [observation for observation in case.observations if observation.num_examples]
    if not kept:
        raise ValueError(f"no round can be used: {'; '.join(dict.fromkeys(map(find_problem, case.observations)))}")
    sizes = [observation.num_examples or 0 for observation in kept]
    return Case(tuple(kept), links=link_same(sizes) if same else link_by_sizes(kept))


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
