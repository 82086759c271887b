"""Registry of losses, and conversion of logits to classes and probabilities. Two classes may have two logits or a single one."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Loss = Callable[[Tensor, Tensor], Tensor]
"""A loss: maps logits (N, K) and labels, hard (N,) int64 or soft (N, num_classes), to the mean over the batch."""


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the softmax cross-entropy of logits (N, K), averaged over N.

    y: indices of classes (N,), or class probabilities (N, K).
    Raises ValueError for a single logit, K = 1, for which the cross-entropy of any class is 0.
    """
    if logits.shape[-1] == 1:
        raise ValueError(
            "this model has a single logit, which cross_entropy cannot use; set training.loss to 'logistic', also for a "
            "regression with one output"
        )
    return functional.cross_entropy(logits, y)


def logistic(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean over N of log(1 + exp(-mu)), mu = (2y - 1) * logit, of logits (N, 1) with classes y (N,), 0 or 1.

    If y holds class probabilities (N, 2), the term of an example is the mean of the terms of both classes, weighted with these
    probabilities. Raises ValueError if there is more than one logit. Source: R-GAP (Zhu and Blaschko 2021), section 3.1.
    """
    if logits.shape[-1] != 1:
        raise ValueError(
            f"the logistic loss takes a single logit, and this model has {logits.shape[-1]}; "
            "give the model outputs = 1, or set training.loss to 'cross_entropy'"
        )
    logit = logits[..., 0]
    if y.ndim == logits.ndim:
        return -(y[..., 1] * functional.logsigmoid(logit) + y[..., 0] * functional.logsigmoid(-logit)).mean()
    return -functional.logsigmoid((2 * y - 1) * logit).mean()


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "logistic": logistic}


def find_loss(name: str) -> Loss:
    """Return the loss function called `name`: "cross_entropy" or "logistic". Raises ValueError for another name."""
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}. Known: {', '.join(LOSSES)}")
    return LOSSES[name]


def predict_classes(logits: Tensor) -> Tensor:
    """Return the most probable class (N,) int64 for logits (N, K). A single logit (N, 1) above 0 means class 1, else class 0."""
    return (logits[..., 0] > 0).long() if logits.shape[-1] == 1 else logits.argmax(dim=-1)


def predict_probabilities(logits: Tensor) -> Tensor:
    """Return class probabilities (N, K) from logits (N, K). A single logit (N, 1) is the logit of class 1 and gives (N, 2)."""
    if logits.shape[-1] != 1:
        return logits.softmax(dim=-1)
    return torch.cat([torch.sigmoid(-logits), torch.sigmoid(logits)], dim=-1)
