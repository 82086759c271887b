"""Similarity of reconstructed table rows: error of continuous columns, and correctness of categorical variables."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from fedsim.recording import Column


def variables(columns: Sequence[Column]) -> list[tuple[int, ...]]:
    """Return the columns of each categorical variable: adjacent one-hot columns of the same name."""
    numbered = groupby(enumerate(columns), key=lambda one: (one[1].kind, one[1].name))
    return [tuple(i for i, _ in group) for (kind, _), group in numbered if kind == "categorical"]


def continuous_error(x: Tensor, truth: Tensor, columns: Sequence[Column] = ()) -> Tensor:
    """Largest absolute error over the continuous columns, as a share of their range; NaN where there are none.

    x, truth: (N, F), columns scaled to [0, 1]. Without `columns` all F are continuous. Returns (N,).
    """
    chosen = [i for i in range(truth.shape[1]) if not columns or columns[i].kind == "continuous"]
    if not chosen:
        return torch.full((len(truth),), torch.nan)
    return (x - truth).abs()[:, chosen].amax(dim=1)


def categorical_right(x: Tensor, truth: Tensor, columns: Sequence[Column] = ()) -> Tensor:
    """Share of the categorical variables whose true category has the largest value of all in x; NaN where there are none.

    x, truth: (N, F), variables one-hot as `columns` tell. Returns (N,). A tie is no answer. Where truth is all zeros, a
    category that training never saw, there is nothing to be right about, and the variable does not count.
    """
    right, known = torch.zeros(len(truth)), torch.zeros(len(truth))
    for variable in variables(columns):
        scores, true = x[:, list(variable)], truth[:, list(variable)]
        seen = true.amax(dim=1) > 0
        own = scores.gather(1, true.argmax(dim=1, keepdim=True))
        reached = (scores >= own).sum(dim=1)
        right += (seen & (reached == 1)).float()
        known += seen.float()
    return right / known
