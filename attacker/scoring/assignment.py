"""Assignment of reconstructions to originals, which is needed since a gradient does not determine the order within a batch."""

from collections.abc import Sequence
from math import inf, isnan, nan

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacker.reconstruction import Reconstruction


def assign_reconstructions(x: Tensor, truth: Tensor, capacities: Sequence[int] | None = None) -> list[int | None]:
    """Assign every reconstruction to an original so that the total MSE is smallest; return the index in x for each original.

    None marks an original to which no reconstruction is assigned.

    x:      (M, *shape), the reconstructions. truth: (N, *shape), the originals.
    capacities: for each original, the largest number of reconstructions that may be assigned to it; by default 1. If several are
            assigned to one original, their smallest index is returned, not the index of the best match. After `keep_first`, which
            sorts reconstructions, the smallest index belongs to the reconstruction that the attack itself ranks highest.

    Every reconstruction is assigned. Raises ValueError if M exceeds the sum of `capacities`: call `keep_first` before, which
    drops the surplus by the attack's own ranking. To drop the worst matches would select reconstructions by truth.
    """
    assigned: list[int | None] = [None] * len(truth)
    owners = [original for original in range(len(truth)) for _ in range(capacities[original] if capacities else 1)]
    if len(x) > len(owners):
        raise ValueError(f"{len(x)} reconstructions for {len(owners)} examples: call keep_first before, which drops the surplus")
    if len(x) and owners:
        distances = torch.stack([(original - x.flatten(1)).square().mean(dim=1) for original in truth.flatten(1)])[owners]
        distances = distances.nan_to_num(nan=float("inf"), posinf=1e9)
        for place, candidate in zip(*linear_sum_assignment(distances.clamp(max=1e9).numpy()), strict=True):
            known = assigned[owners[place]]
            assigned[owners[place]] = int(candidate) if known is None else min(known, int(candidate))
    return assigned


def rank_candidates(confidence: Tensor, explained: Tensor | None) -> list[int]:
    """Return the indices of reconstructed examples by the attack's own ranking, best first.

    confidence: (M,), higher is better. Examples with confidence NaN come last, sorted by `explained` (M,), the share of the
    gradient that an example explains, if that is given; higher is better, and NaN is last. Ties keep their order.
    """
    sure = confidence.tolist()
    parts = [nan] * len(sure) if explained is None else explained.tolist()

    def get_sort_key(i: int) -> tuple[bool, float]:
        undecided = isnan(sure[i])
        value = parts[i] if undecided else sure[i]
        return undecided, inf if isnan(value) else -value

    return sorted(range(len(sure)), key=get_sort_key)


def keep_first(reconstruction: Reconstruction, limit: int) -> Reconstruction:
    """Return the reconstruction with only its `limit` best examples by the attack's own ranking, sorted, best first.

    If it has fewer examples, all are kept and sorted.
    The slots (places in the client's batches that an example fills) of dropped examples are dropped, too.
    """
    return reconstruction.select(rank_candidates(reconstruction.confidence, reconstruction.explained)[:limit])
