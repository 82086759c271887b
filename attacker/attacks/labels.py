"""How labels are read off a gradient before any image is known.

For softmax cross-entropy over a batch of n, row c of the head's gradient is the mean of (p_c - 1[c = y]) times the
features, and its bias gradient the mean of p_c - 1[c = y].
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attacker.attacks.objectives import Gradient


class Evidence(NamedTuple):
    """gradient: observed, by name. weight, bias: names of the head's parameters. examples: how many are behind the gradient.

    guess: (K,) the model's mean class probabilities on the attacker's own random inputs.
    """

    gradient: Gradient
    weight: str
    bias: str | None
    examples: int
    guess: Tensor


LabelRule = Callable[[Evidence], Tensor]
"""From the evidence, labels (examples,) int64 in ascending order."""


def from_bias(evidence: Evidence) -> Tensor:
    """Of one example, the most negative bias gradient. Of n, counts `n * (mean p_c - g_c)`, rounded to n in all.

    Exact for one example, whatever the features. For more, mean p_c is guessed: exact while the model is hardly trained.
    """
    if evidence.bias is None:
        raise ValueError("the head has no bias")
    bias = evidence.gradient[evidence.bias]
    if evidence.examples == 1:
        return bias.argmin().reshape(1)
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
    """
    rows = evidence.gradient[evidence.weight]
    if evidence.examples == 1:
        return rows.sum(dim=1).argmin().reshape(1)
    if evidence.examples > len(rows):
        raise ValueError(f"{evidence.examples} examples cannot have distinct labels among {len(rows)} classes")
    return rows.amin(dim=1).topk(evidence.examples, largest=False).indices.sort().values


def inferred(evidence: Evidence) -> Tensor:
    """By the bias where the head has one, which holds for any features; by its rows otherwise."""
    return from_rows(evidence) if evidence.bias is None else from_bias(evidence)
