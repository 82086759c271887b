"""How labels are read off a gradient before any image is known.

For softmax cross-entropy over a batch of n, row c of the head's gradient is the mean of (p_c - 1[c = y]) times the
features, and its bias gradient the mean of p_c - 1[c = y]. For the logistic loss of one example, the only row of the head's
gradient is (p_1 - y) times the features, and its bias gradient p_1 - y.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attacker.attacks.objectives import Gradient


class Evidence(NamedTuple):
    """gradient: observed, by name. weight, bias: names of the head's parameters. examples: how many are behind the gradient.

    guess: (K,) the model's mean class probabilities on the attacker's own random inputs.
    shortened: whether the attacker knows of a defense that may have made the gradient shorter.
    """

    gradient: Gradient
    weight: str
    bias: str | None
    examples: int
    guess: Tensor
    shortened: bool = False


LabelRule = Callable[[Evidence], Tensor]
"""From the evidence, labels (examples,) int64 in ascending order."""


def from_bias(evidence: Evidence) -> Tensor:
    """Of one example, the most negative bias gradient. Of n, counts `n * (mean p_c - g_c)`, rounded to n in all.

    Exact for one example, whatever the features; with a single logit, class 1 where the only entry is negative. For more,
    mean p_c is guessed: exact while the model is hardly trained. Of a shortened gradient of fewer examples than classes, g is
    first stretched so that the class with the largest g_c / mean p_c has none. Raises ValueError for more with a single logit.
    """
    if evidence.bias is None:
        raise ValueError("the head has no bias")
    bias = evidence.gradient[evidence.bias]
    if len(bias) == 1:
        return _from_sign(bias.sum(), evidence.examples)
    if evidence.examples == 1:
        return bias.argmin().reshape(1)
    if evidence.shortened and evidence.examples < len(bias):  # at least one class has none
        share = (bias / evidence.guess).max()
        bias = bias / torch.where((share > 0) & (share < 1), share, 1)
    counts = (evidence.examples * (evidence.guess - bias)).clamp(min=0)
    if not torch.isfinite(counts).all() or counts.sum() <= 0:  # noise has the last word
        counts = evidence.guess
    counts = counts * (evidence.examples / counts.sum())
    whole = counts.floor().long()
    remaining = int(evidence.examples - whole.sum())
    whole[(counts - whole).topk(remaining).indices] += 1
    return torch.repeat_interleave(torch.arange(len(whole), device=whole.device), whole)


def from_rows(evidence: Evidence) -> Tensor:
    """Of one example, the smallest row sum of the head's gradient (iDLG; CPL, algorithm 1 line 9); features must not be negative.

    Of n examples with distinct labels, the n rows with the smallest entries (Yin et al. 2021, eq. 6).

    With a single logit, class 1 where the sum is negative: right for one example whose features are positive for the most part.
    Raises ValueError for more examples than one with a single logit, or than classes.
    """
    rows = evidence.gradient[evidence.weight]
    if len(rows) == 1:
        return _from_sign(rows.sum(), evidence.examples)
    if evidence.examples == 1:
        return rows.sum(dim=1).argmin().reshape(1)
    if evidence.examples > len(rows):
        raise ValueError(f"{evidence.examples} examples cannot have distinct labels among {len(rows)} classes")
    return rows.amin(dim=1).topk(evidence.examples, largest=False).indices.sort().values


def inferred(evidence: Evidence) -> Tensor:
    """By the bias where the head has one, which holds for any features; by its rows otherwise.

    Also by the rows where the bias of one example's label was not sent: then none is negative, and that of a single logit is 0.
    """
    if evidence.bias is None:
        return from_rows(evidence)
    bias = evidence.gradient[evidence.bias]
    unsent = (bias == 0).all() if len(bias) == 1 else not (bias < 0).any()
    return from_rows(evidence) if unsent and evidence.examples == 1 else from_bias(evidence)


def _from_sign(slope: Tensor, examples: int) -> Tensor:
    """The label of one example from a number with the sign of p_1 - y."""
    if examples != 1:
        raise ValueError(f"{examples} examples behind a single logit: their labels add up to one number; told labels are needed")
    return (slope < 0).long().reshape(1)
