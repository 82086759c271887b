"""Functions for attacks on several local epochs in one round, which use the same examples in orders unknown to the server.

Method of Dimitrov et al. 2022, "Data leakage in federated averaging": each epoch is reconstructed with separate examples, a prior
penalises differences between epochs in quantities that do not depend on the order, and at the end similar examples are matched
across epochs and averaged.
"""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedsim.recording.training import Training


def count_separate_epochs(weight: float, training: Training) -> int:
    """Return how many separate sets of examples the attack searches for: one per local epoch.

    There is only one if `weight` is 0, or if clients train for a number of steps instead of epochs.
    weight: factor of `measure_disagreement` in the attack's loss.
    """
    return (training.epochs or 1) if weight else 1


def measure_disagreement(x: Tensor, epochs: int) -> Tensor:
    """Return the mean squared difference between the mean examples of two epochs, averaged over all pairs of epochs, 0-d.

    x: (epochs * N, *shape), the examples of one epoch after the other, for at least two epochs.
    Source: Dimitrov et al. 2022, equation 8, with the mean as the order-invariant function g.
    """
    means = x.reshape(epochs, -1, *x.shape[1:]).mean(dim=1)
    between: Tensor = (means[:, None] - means[None]).square().mean() * epochs / (epochs - 1)
    return between


def merge_epochs(x: Tensor, y: Tensor, epochs: int) -> tuple[Tensor, Tensor]:
    """Return N examples (N, *shape) and their labels from the separate examples of all epochs.

    The examples of each later epoch are assigned one to one to the examples of the first epoch, by the Hungarian method on
    squared distances, where possible to examples with the same hard label. Assigned examples are averaged. The labels of the
    first epoch are returned.
    x: (epochs * N, *shape). y: (epochs * N,), or soft labels (epochs * N, K).
    """
    if epochs == 1:
        return x, y
    first, *later = x.detach().reshape(epochs, -1, *x.shape[1:])
    labels = y[: len(first)]
    total = first.clone()
    for other in later:
        cost = torch.cdist(first.flatten(1), other.flatten(1)).square().double()
        if labels.ndim == 1:
            cost = cost.masked_fill(labels[:, None] != labels[None], 1e9)
        rows, columns = linear_sum_assignment(cost.nan_to_num(1e12).cpu().numpy())
        total[torch.from_numpy(rows)] += other[torch.from_numpy(columns)]
    return total / epochs, labels
