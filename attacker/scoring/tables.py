"""Similarity of reconstructed table rows: error of continuous columns, and correctness of categorical variables."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from fedsim.recording import Column


def variables(columns: Sequence[Column]) -> list[tuple[int, ...]]:
    """Return the column indices of each categorical variable, which consists of adjacent one-hot columns with the same name."""
    numbered = groupby(enumerate(columns), key=lambda one: (one[1].kind, one[1].name))
    return [tuple(i for i, _ in group) for (kind, _), group in numbered if kind == "categorical"]


def continuous_error(x: Tensor, truth: Tensor, columns: Sequence[Column] = ()) -> Tensor:
    """Return the largest absolute error over the continuous columns of each row, (N,); NaN if there are none.

    x, truth: (N, F), columns scaled to [0, 1], so that errors are fractions of a column's range. Without `columns` all F columns
    are continuous.
    """
    chosen = [i for i in range(truth.shape[1]) if not columns or columns[i].kind == "continuous"]
    if not chosen:
        return torch.full((len(truth),), torch.nan)
    return (x - truth).abs()[:, chosen].amax(dim=1)


def categorical_right(x: Tensor, truth: Tensor, columns: Sequence[Column] = ()) -> Tensor:
    """Return the share of categorical variables whose true category has the largest value in x, (N,); NaN if there are none.

    x, truth: (N, F), with one-hot variables as described by `columns`. A tie counts as wrong. A variable that is all zeros in
    truth, a category not seen in training, is ignored.
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
