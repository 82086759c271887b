"""How labels are read off a gradient before any image is known.

For softmax cross-entropy over a batch of n, row c of the head's gradient is the mean of (p_c - 1[c = y]) times the
features, and its bias gradient the mean of p_c - 1[c = y]. For the logistic loss of one example, the only row of the head's
gradient is (p_1 - y) times the features, and its bias gradient p_1 - y.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from attacker.attacks.gradients.products import Gradient
from attacker.attacks.labels.counts import by_balance, by_class_features, by_impact, stand_in_bias, whole
from attacker.attacks.labels.fit import WORK, head_fit, most_probable

ADDS_UP = 1e-2
"""What the sum of the head's rows may be, as a share of all their norm, where no noise, sign or mask has changed a gradient."""

WHOLE = 0.15
"""How near to whole numbers counts must be for a gradient to have its full length."""


class Head(NamedTuple):
    """The last linear layer: weight (K, F), bias (K,) or None; and features (M, F) that it is given of inputs of anyone's."""

    weight: Tensor
    bias: Tensor | None
    features: Tensor


class Evidence(NamedTuple):
    """gradient: observed, by name. weight, bias: names of the head's parameters. examples: how many are behind the gradient.

    guess: (K,) the model's mean class probabilities on the attacker's own random inputs.
    shortened: whether the attacker knows of a defense that may have made the gradient shorter.
    head: the head itself, where rules may look at it; of an update of several local steps, halfway through them, as is `guess`.
    """

    gradient: Gradient
    weight: str
    bias: str | None
    examples: int
    guess: Tensor
    shortened: bool = False
    head: Head | None = None


LabelRule = Callable[[Evidence], Tensor]
"""From the evidence, labels (examples,) int64 in ascending order."""


def from_bias(evidence: Evidence) -> Tensor:
    """Of one example, the most negative bias gradient. Of n, counts `n * (mean p_c - g_c)`, rounded to n in all.

    Exact for one example, whatever the features; with a single logit, class 1 where the only entry is negative. For more,
    mean p_c is guessed: exact while the model is hardly trained. Of a shortened gradient of fewer examples than classes, g is
    first stretched so that the class with the largest g_c / mean p_c has none. Raises ValueError where the head has no bias.
    """
    if evidence.bias is None:
        raise ValueError("the head has no bias")
    return _labels(_balance(evidence, _two_sided(evidence.gradient[evidence.bias])))


def from_rows(evidence: Evidence) -> Tensor:
    """Of one example, the smallest row sum of the head's gradient (iDLG; CPL, algorithm 1 line 9); features must not be negative.

    Of n examples with distinct labels, the n rows with the smallest entries (Yin et al. 2021, eq. 6).

    With a single logit, class 1 where the sum is negative: right for one example whose features are positive for the most part.
    Raises ValueError for more examples than one with a single logit, or than classes.
    """
    rows = evidence.gradient[evidence.weight]
    if len(rows) == 1 and evidence.examples > 1:
        raise ValueError(f"{evidence.examples} examples behind a single logit have one row in common; use the rule 'inferred'")
    if evidence.examples == 1:
        return _two_sided(rows.sum(dim=1)).argmin().reshape(1)
    if evidence.examples > len(rows):
        raise ValueError(f"{evidence.examples} examples cannot have distinct labels among {len(rows)} classes")
    return rows.amin(dim=1).topk(evidence.examples, largest=False).indices.sort().values


def llg(evidence: Evidence) -> Tensor:
    """Counts from the row sums of the head's gradient (Wainakh et al. 2022, LLG, by shared gradients alone).

    Features must not be negative for the most part.
    """
    return _labels(by_impact(_two_sided(evidence.gradient[evidence.weight].sum(dim=1)), evidence.examples))


def ilrg(evidence: Evidence) -> Tensor:
    """Counts from one feature a class (Ma et al. 2023, iLRG). Where the head has no bias, its gradient is estimated.

    Raises ValueError where the evidence does not hold the head.
    """
    if evidence.head is None:
        raise ValueError("iLRG needs the weights of the head beside its gradient: give Evidence.head")
    rows = _two_sided(evidence.gradient[evidence.weight])
    return _labels(by_class_features(rows, _bias(evidence), *_layer(evidence.head), evidence.examples))


def inferred(evidence: Evidence) -> Tensor:
    """Of one example, by the bias, which holds for any features; by the rows where there is none, or it was not sent.

    Of n, the counts whose features are most probable (`label_fit`), beginning with those by the bias and by iLRG; a shortened
    gradient is first stretched. Where that is too much work: by iLRG for fewer than half as many examples as classes. Otherwise,
    and where the head is not known or noise, signs or missing entries keep the rows from adding up to 0, by the bias, which is
    estimated where there is none.
    """
    if evidence.examples == 1:
        return _one_label(evidence)
    if evidence.head is not None and _adds_up(evidence):
        return _labels(_most_probable(evidence, evidence.head))
    if evidence.head is None and evidence.bias is None:
        return from_rows(evidence)
    return _labels(_balance(evidence, _bias(evidence)))


LABEL_RULES: Mapping[str, LabelRule] = MappingProxyType(
    {"bias": from_bias, "rows": from_rows, "llg": llg, "ilrg": ilrg, "inferred": inferred}
)


def label_rule(name: str) -> LabelRule | None:
    """The rule of that name; None for "joint", where labels are searched for with the examples. Raises ValueError if unknown."""
    if name == "joint":
        return None
    if name not in LABEL_RULES:
        raise ValueError(f"unknown label rule {name!r}. Known: {', '.join([*LABEL_RULES, 'joint'])}")
    return LABEL_RULES[name]


def _one_label(evidence: Evidence) -> Tensor:
    if evidence.bias is None:
        return from_rows(evidence)
    bias = evidence.gradient[evidence.bias]
    unsent = (bias == 0).all() if len(bias) == 1 else not (bias < 0).any()
    return from_rows(evidence) if unsent else from_bias(evidence)


def _balance(evidence: Evidence, bias: Tensor) -> Tensor:
    """(K,) counts by the bias's gradient (K,)."""
    guess = evidence.guess
    if evidence.examples == 1:
        return torch.nn.functional.one_hot(bias.argmin(), len(bias))
    if evidence.shortened and evidence.examples < len(bias):  # at least one class has none
        share = (bias / guess).max()
        bias = bias / torch.where((share > 0) & (share < 1), share, 1)
    if not torch.isfinite(bias).all() or (guess - bias <= 0).all():  # noise has the last word
        return whole(guess, evidence.examples)
    return by_balance(bias, guess, evidence.examples)


def _most_probable(evidence: Evidence, head: Head) -> Tensor:
    """(K,) counts; by simpler rules where a fit is no use, or too much work."""
    rows, bias = _two_sided(evidence.gradient[evidence.weight]), _bias(evidence)
    if evidence.shortened:
        factor = _lengthening(bias, evidence.guess, evidence.examples)
        rows, bias = factor * rows, factor * bias
    balanced = by_balance(bias, evidence.guess, evidence.examples)
    classes = by_class_features(rows, bias, *_layer(head), evidence.examples)
    fit = head_fit(rows, bias if _sent(evidence) else None, *_layer(head), head.features, evidence.examples)
    if fit.work > WORK:
        return classes if 2 * evidence.examples < len(rows) else balanced
    calibrated = by_balance(bias, torch.full_like(evidence.guess, 1 / len(rows)), evidence.examples)
    return most_probable(fit, [balanced, calibrated, classes]).to(rows.device)


def _adds_up(evidence: Evidence) -> bool:
    """Whether the head's gradient is that of a softmax, up to its length: its rows add up to 0. A single logit's cannot tell."""
    rows = _two_sided(evidence.gradient[evidence.weight])
    if len(evidence.gradient[evidence.weight]) == 1:
        return not evidence.shortened and bool(rows.isfinite().all() and rows.any())
    return bool(rows.isfinite().all() and rows.any() and rows.sum(dim=0).norm() <= ADDS_UP * rows.norm())


def _lengthening(bias: Tensor, guess: Tensor, examples: int) -> Tensor:
    """By what to multiply a shortened gradient so that some class has no example; 1 where all counts are whole as it is."""
    counts, share = examples * (guess - bias), (bias / guess).max()
    whole_already = (counts - counts.round()).abs().max() < WHOLE
    return torch.where((share > 0) & (share < 1) & ~whole_already, 1 / share, 1)


def _sent(evidence: Evidence) -> bool:
    """Whether there is a gradient of the head's bias."""
    return evidence.bias is not None and bool((evidence.gradient[evidence.bias] != 0).any())


def _bias(evidence: Evidence) -> Tensor:
    """(K,), the gradient of the head's bias, or about what it would be."""
    if evidence.bias is not None and (_sent(evidence) or evidence.head is None):
        return _two_sided(evidence.gradient[evidence.bias])
    if evidence.head is None:
        raise ValueError("the head has no bias, and the evidence holds no features that could stand in: give Evidence.head")
    return stand_in_bias(_two_sided(evidence.gradient[evidence.weight]), evidence.head.features)


def _layer(head: Head) -> tuple[Tensor, Tensor]:
    """The head's weight (K, F) and bias (K,); of a single logit those of two classes, the first of which has logit 0."""
    bias = torch.zeros_like(head.weight[:, 0]) if head.bias is None else head.bias
    if len(bias) > 1:
        return head.weight, bias
    return torch.cat([torch.zeros_like(head.weight), head.weight]), torch.cat([torch.zeros_like(bias), bias])


def _two_sided(slope: Tensor) -> Tensor:
    """(K, ...), a gradient by logit; of a single logit as if the other class had one, too."""
    return slope if len(slope) > 1 else torch.cat([-slope, slope])


def _labels(counts: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
