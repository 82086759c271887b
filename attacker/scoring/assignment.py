"""Which reconstruction is to be compared with which original: a gradient knows no order within a batch."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def assign(x: Tensor, truth: Tensor) -> list[int | None]:
    """For each original, the index of its reconstruction: one to one, with the least total mean squared error.

    x: (M, *shape), truth: (N, *shape). More of x than of truth, where a client used an example twice in a round, is a choice
    that favours the attack. None where fewer reconstructions than originals are there: a failure of the attack.
    """
    assigned: list[int | None] = [None] * len(truth)
    if len(x) and len(truth):
        distances = torch.stack([(one - x.flatten(1)).square().mean(dim=1) for one in truth.flatten(1)])
        distances = distances.nan_to_num(nan=float("inf"), posinf=1e9)
        for original, candidate in zip(*linear_sum_assignment(distances.clamp(max=1e9).numpy()), strict=True):
            assigned[int(original)] = int(candidate)
    return assigned
