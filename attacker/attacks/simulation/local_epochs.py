"""Several local epochs in one round: the same examples pass again, in an order that nobody knows.

Dimitrov et al. 2022, "Data leakage in federated averaging": each epoch gets examples of its own, a prior draws what does not
depend on their order together, and at the end examples of the same label are matched over epochs and averaged.
"""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedsim.recording.observation import Training


def separate(weight: float, training: Training) -> int:
    """How many epochs get examples of their own: 1 where the prior has no weight, or the client makes no more than one."""
    return (training.epochs or 1) if weight else 1


def disagreement(x: Tensor, epochs: int) -> Tensor:
    """Mean squared difference between the mean examples of any two epochs, x (epochs * N, *shape) (their eq. 8, g the mean)."""
    means = x.reshape(epochs, -1, *x.shape[1:]).mean(dim=1)
    between: Tensor = (means[:, None] - means[None]).square().mean() * epochs / (epochs - 1)
    return between


def merged(x: Tensor, y: Tensor, epochs: int) -> tuple[Tensor, Tensor]:
    """N examples out of x (epochs * N, *shape) and y (epochs * N,) or soft (epochs * N, K).

    Examples of later epochs are assigned to those of the first, of the same label where labels are known, and averaged.
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
