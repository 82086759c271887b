"""Assignment of reconstructions to originals, since a gradient does not determine the order within a batch."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isnan, nan

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacker.reconstruction import Reconstruction


def assign_reconstructions(x: Tensor, truth: Tensor, places: Sequence[int] | None = None) -> list[int | None]:
    """Return, for each original, the index of its reconstruction: the one-to-one assignment with the smallest total MSE.

    x: (M, *shape). truth: (N, *shape). places: largest number of reconstructions that may be assigned to each original, by
    default 1; of several, the one with the smallest index is returned. None marks an original without a reconstruction, a failure
    of the attack. Raises ValueError if M exceeds the sum of `places`: dropping the worst matches would select reconstructions by
    truth, so `keep_first` must select before.
    """
    assigned: list[int | None] = [None] * len(truth)
    owners = [original for original in range(len(truth)) for _ in range(places[original] if places else 1)]
    if len(x) > len(owners):
        raise ValueError(f"{len(x)} reconstructions for {len(owners)} examples: drop the surplus with keep_first before assign")
    if len(x) and owners:
        distances = torch.stack([(one - x.flatten(1)).square().mean(dim=1) for one in truth.flatten(1)])[owners]
        distances = distances.nan_to_num(nan=float("inf"), posinf=1e9)
        for place, candidate in zip(*linear_sum_assignment(distances.clamp(max=1e9).numpy()), strict=True):
            known = assigned[owners[place]]
            assigned[owners[place]] = int(candidate) if known is None else min(known, int(candidate))
    return assigned


def rank_candidates(confidence: Tensor, explained: Tensor | None = None) -> list[int]:
    """Return the indices of an attack's candidates by the attack's own ranking, best first.

    confidence: (M,), higher is better. Candidates with confidence NaN come last, sorted by `explained` (M,), the share of the
    gradient that a candidate explains, if that is given. Ties keep their order.
    """
    sure = confidence.tolist()
    parts = [nan] * len(sure) if explained is None else explained.tolist()

    def get_sort_key(i: int) -> tuple[bool, float]:
        undecided = isnan(sure[i])
        value = parts[i] if undecided else sure[i]
        return undecided, inf if isnan(value) else -value

    return sorted(range(len(sure)), key=get_sort_key)


def keep_first(found: Reconstruction, most: int) -> Reconstruction:
    """Return a reconstruction of only the first `most` examples by the attack's own ranking, without the slots of the others."""
    kept = rank_candidates(found.confidence, found.explained)[:most]
    numbers = {example: number for number, example in enumerate(kept)}
    slots = tuple(replace(slot, example=numbers[slot.example]) for slot in found.slots if slot.example in numbers)
    explained = None if found.explained is None else found.explained[kept]
    evidence = {name: tuple(values[i] for i in kept) for name, values in found.evidence.items()}
    confidence = found.confidence[kept]
    return replace(
        found, x=found.x[kept], y=found.y[kept], confidence=confidence, explained=explained, evidence=evidence, slots=slots
    )
