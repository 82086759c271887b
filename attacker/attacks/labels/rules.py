"""Label rules: functions that infer the labels of a batch from the gradient of the last layer, the head, before any search.

For softmax cross-entropy over a batch of n examples, row c of the head's weight gradient is the mean of (p_c - 1[c = y]) times
the features, and entry c of its bias gradient is the mean of p_c - 1[c = y]. For the logistic loss of one example, the only row
is (p_1 - y) times the features, and the bias gradient is p_1 - y.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from attacker.attacks.gradients.products import GradientTensors
from attacker.attacks.labels.counts import (
    choose_most_integer,
    count_by_impact,
    estimate_bias_gradient,
    estimate_by_balance,
    estimate_by_class_features,
    estimate_from_sent_entries,
    round_counts,
)
from attacker.attacks.labels.fit import MAX_WORK, build_head_fit, find_most_probable

MAX_ROW_SUM = 1e-2
"""Largest norm of the sum of the head's rows, relative to their norm, at which a gradient counts as unchanged by noise, signs or
masks: without those the rows add up to 0."""

MIN_ACTIVE = 0.9
"""Smallest share of random inputs for which a feature is active, at which it should be so for one of the examples as well."""

INTEGER_TOLERANCE = 0.15
"""Largest distance of estimated counts from integers at which a gradient's norm counts as not reduced by clipping."""


class Head(NamedTuple):
    """The head, the last linear layer: weight (K, F), bias (K,) or None, and its inputs (M, F) for M random network inputs."""

    weight: Tensor
    bias: Tensor | None
    features: Tensor


class Evidence(NamedTuple):
    """The information from which a label rule infers labels.

    gradient:  observed gradient, by parameter name. weight, bias: names of the head's parameters; bias is None if it has none.
    examples:  number of examples in the batch.
    guess:     mean class probabilities (K,) that the model predicts for random inputs.
    shortened: whether the attacker knows of any defense of the clients. The norm of the gradient may then be reduced, for example
               by clipping.
    head:      the head's weight and bias, and its inputs for random inputs of the network; None if the caller does not know them.
               `head` and `guess` are computed at the weights that the server sent. With several local steps and no known defense,
               they are computed at an estimate of the mean weights during these steps (`read_labels`).
    """

    gradient: GradientTensors
    weight: str
    bias: str | None
    examples: int
    guess: Tensor
    shortened: bool = False
    head: Head | None = None


LabelRule = Callable[[Evidence], Tensor]
"""Maps the evidence to labels (examples,), int64, in ascending order."""


def infer_from_bias(evidence: Evidence) -> Tensor:
    """Infer labels, in ascending order, from the gradient g of the head's bias.

    For one example, the label is the class of the most negative entry. This is right for the gradient of softmax cross-entropy if
    no defense changed it. With a single logit the label is class 1 if the entry is negative.

    For n examples, the counts are `n * (mean p_c - g_c)`, rounded to the sum n. The mean probabilities p are those for random
    inputs (`Evidence.guess`), which is accurate for models that are hardly trained. If a defense may have reduced the norm of g
    and n is below the number of classes, g is first scaled up so that the class with the largest g_c / mean p_c has no example.
    Raises ValueError if the head has no bias.
    """
    if evidence.bias is None:
        raise ValueError("the label rule 'bias' needs a bias in the last layer, which has none; use the rule 'inferred'")
    return _expand_counts(_count_by_balance(evidence, add_negative_logit(evidence.gradient[evidence.bias])))


def infer_from_rows(evidence: Evidence) -> Tensor:
    """Infer labels, in ascending order, from the rows of the head's weight gradient, one row per class.

    For one example, the label is the class whose row has the smallest sum (iDLG; CPL, algorithm 1 line 9), which is right if
    features are not negative. With a single logit, it is class 1 if the sum of the only row is negative. For n examples, which
    must have distinct labels, they are the n classes in whose rows the smallest entry is lowest (Yin et al. 2021, eq. 6).
    Raises ValueError for more examples than classes, or for more than one example with a single logit.
    """
    rows = evidence.gradient[evidence.weight]
    if len(rows) == 1 and evidence.examples > 1:
        raise ValueError(
            f"the label rule 'rows' cannot infer the labels of {evidence.examples} examples if the model has a single logit; "
            "use 'inferred'"
        )
    if evidence.examples == 1:
        return add_negative_logit(rows.sum(dim=1)).argmin().reshape(1)
    if evidence.examples > len(rows):
        raise ValueError(
            f"the label rule 'rows' needs a different label for each of the {evidence.examples} examples, and the model has only "
            f"{len(rows)} classes; use 'inferred'"
        )
    return rows.amin(dim=1).topk(evidence.examples, largest=False).indices.sort().values


def llg(evidence: Evidence) -> Tensor:
    """Infer labels from the row sums of the head's weight gradient (Wainakh et al. 2022, LLG with shared gradients alone).

    It assumes that features are mostly positive.
    """
    return _expand_counts(count_by_impact(add_negative_logit(evidence.gradient[evidence.weight].sum(dim=1)), evidence.examples))


def ilrg(evidence: Evidence) -> Tensor:
    """Infer labels from the rows of the head's weight gradient, divided by the gradient of its bias (Ma et al. 2023, iLRG).

    Each quotient is taken for the features of all examples of a class, see `estimate_by_class_features`. If the head has no bias
    or its gradient was not sent, the gradient that a bias would have is estimated. Raises ValueError if the evidence lacks the
    head.
    """
    if evidence.head is None:
        raise ValueError("the label rule 'ilrg' needs the weights of the last layer; set Evidence.head, or choose another rule")
    rows = add_negative_logit(evidence.gradient[evidence.weight])
    counts = estimate_by_class_features(rows, _get_bias_gradient(evidence), *_get_layer(evidence.head), evidence.examples)
    return _expand_counts(round_counts(counts, evidence.examples))


def infer_labels(evidence: Evidence) -> Tensor:
    """Infer labels by the method that suits the evidence: bias gradient, rows of the weight gradient, or a fit to both.

    For one example, the label follows from the bias's gradient; if there is no bias or its gradient was not sent, from the rows.

    If all entries of the rows have the same magnitude, because only signs were sent, the counts of n examples are computed from
    the sums of the rows (LLG). So they are for a head without a bias, fewer examples than classes, and random inputs without
    negative features, if a known defense left out whole columns, as Soteria does.

    Otherwise, for n examples of K classes, the counts are fitted to the head's gradient (module `fit`) if the evidence has the
    head and the rows add up to 0, as they do unless a defense added noise or left out entries. If the fit is too expensive
    (MAX_WORK), the counts are computed from the bias's gradient, or for n < K / 2 by iLRG if its estimates are nearer to
    integers. With a single logit, a fit is made unless a defense may have reduced the norm of the gradient.

    Without a fit, the counts are computed from the bias's gradient. If there is no bias or its gradient was not sent, they are
    computed from the sums of the rows, if random inputs have no negative features; otherwise the gradient of the bias is
    estimated from the rows and `Evidence.head`. Without the head either, `infer_from_rows` is used.
    """
    if evidence.examples == 1:
        return _infer_one_label(evidence)
    masked = evidence.examples < len(evidence.guess) and _has_positive_features(evidence) and _lacks_columns(evidence)
    if masked or _sends_signs(evidence):
        return _expand_counts(_count_by_row_sums(evidence))
    if evidence.head is not None and _has_zero_sum(evidence):
        return _expand_counts(_find_most_probable(evidence, evidence.head))
    if evidence.head is None and not _is_bias_sent(evidence):
        return infer_from_rows(evidence)
    if _has_positive_features(evidence):
        return _expand_counts(_count_by_row_sums(evidence))
    return _expand_counts(_count_by_balance(evidence, _get_bias_gradient(evidence)))


LABEL_RULES: Mapping[str, LabelRule] = MappingProxyType(
    {"bias": infer_from_bias, "rows": infer_from_rows, "llg": llg, "ilrg": ilrg, "inferred": infer_labels}
)


def get_label_rule(name: str) -> LabelRule | None:
    """Return the label rule with this name in `LABEL_RULES`; None for "joint", which optimises labels together with the examples.

    Raises ValueError for an unknown name.
    """
    if name == "joint":
        return None
    if name not in LABEL_RULES:
        raise ValueError(
            f"unknown label rule {name!r}. Known: {', '.join(LABEL_RULES)}, or joint, which optimises labels together with "
            "examples"
        )
    return LABEL_RULES[name]


def _count_by_row_sums(evidence: Evidence) -> Tensor:
    """Return the number of examples of each class, (K,), from the sums s of the rows, which must belong to several logits.

    For fewer examples than classes, or if signs were sent, by LLG, which first gives an example to each class with a negative
    sum. From signs, the largest sum is first subtracted from all: zeros are sent as positive signs, so that a class with examples
    has a positive sum if most of its features are inactive. Otherwise, the counts are `n * (mean p_c - s_c / S)`, with
    `Evidence.guess` for mean p, and with S such that the smallest is 0.
    """
    sums, n, guess = evidence.gradient[evidence.weight].sum(dim=1), evidence.examples, evidence.guess
    if _sends_signs(evidence):
        return count_by_impact(sums - sums.max(), n)
    size = (sums / guess).max()
    if n < len(sums) or not 0 < size < torch.inf:
        return count_by_impact(sums, n)
    return round_counts(estimate_by_balance(sums / size, guess, n), n)


def _sends_signs(evidence: Evidence) -> bool:
    """Return whether the rows of a head with several logits consist of signs: entries of one magnitude that is not 0."""
    size = evidence.gradient[evidence.weight].abs()
    return len(size) > 1 and bool(size.amin() > 0) and torch.allclose(size.amin(), size.amax())


def _has_positive_features(evidence: Evidence) -> bool:
    """Return whether the labels can be read from the row sums: the head has several logits, no bias whose gradient was sent, and
    for random inputs no negative features, as behind ReLU.
    """
    if evidence.head is None or len(evidence.head.weight) == 1 or _is_bias_sent(evidence):
        return False
    return bool((evidence.head.features >= 0).all())


def _lacks_columns(evidence: Evidence) -> bool:
    """Return whether a known defense seems to have left out the gradients of some features: they are zero in all rows, although
    the features are active for nearly all random inputs.
    """
    if evidence.head is None or not evidence.shortened:
        return False
    active = (evidence.head.features > 0).double().mean(dim=0) >= MIN_ACTIVE
    return bool((active & (evidence.gradient[evidence.weight] == 0).all(dim=0)).any())


def _infer_one_label(evidence: Evidence) -> Tensor:
    if evidence.bias is None:
        return infer_from_rows(evidence)
    bias = evidence.gradient[evidence.bias]
    unsent = (bias == 0).all() if len(bias) == 1 else not (bias < 0).any()
    return infer_from_rows(evidence) if unsent else infer_from_bias(evidence)


def _count_by_balance(evidence: Evidence, bias: Tensor) -> Tensor:
    """Return the number of examples of each class, (K,), from the gradient g (K,) of the bias.

    For one example, the class is that of the most negative entry. For n examples, the numbers are `n * (mean p_c - g_c)`, rounded
    to the sum n, with `Evidence.guess` for mean p. If a defense may have reduced the norm of g and n < K, g is first scaled up so
    that the smallest of these numbers, the one of the class with the largest g_c / mean p_c, is 0; g is never scaled down. If
    noise makes an entry of g infinite or NaN, or leaves no number positive, the numbers are proportional to mean p.
    """
    guess = evidence.guess
    if evidence.examples == 1:
        return torch.nn.functional.one_hot(bias.argmin(), len(bias))
    if evidence.shortened and evidence.examples < len(bias):  # at least one class has none
        share = (bias / guess).max()
        bias = bias / torch.where((share > 0) & (share < 1), share, 1)
    if not torch.isfinite(bias).all() or (guess - bias <= 0).all():  # the gradient is dominated by noise
        return round_counts(guess, evidence.examples)
    return round_counts(estimate_by_balance(bias, guess, evidence.examples), evidence.examples)


def _find_most_probable(evidence: Evidence, head: Head) -> Tensor:
    """Return the most probable counts (K,) by a fit to the head's gradient.

    The gradient is first scaled up if a defense may have reduced its norm. If the fit is too expensive (MAX_WORK), the counts are
    computed from the bias's gradient, or for fewer than K / 2 examples by iLRG if its estimates are nearer to integers. If no
    gradient of a bias was sent and features are not negative, they are then those of LLG.
    """
    rows, bias = add_negative_logit(evidence.gradient[evidence.weight]), _get_bias_gradient(evidence)
    if evidence.shortened:
        factor = _estimate_scale(bias, evidence.guess, evidence.examples)
        rows, bias = factor * rows, factor * bias
    n = evidence.examples
    balanced = estimate_by_balance(bias, evidence.guess, n)
    by_class = estimate_by_class_features(rows, bias, *_get_layer(head), n)
    fit = build_head_fit(rows, bias if _is_bias_sent(evidence) else None, *_get_layer(head), head.features, n)
    if fit.work > MAX_WORK and _has_positive_features(evidence):
        return _count_by_row_sums(evidence)
    if fit.work > MAX_WORK:
        return choose_most_integer([balanced, by_class] if 2 * n < len(rows) else [balanced], n)
    calibrated = estimate_by_balance(bias, torch.full_like(evidence.guess, 1 / len(rows)), n)
    starts = [round_counts(counts, n) for counts in (balanced, calibrated, by_class)]
    return find_most_probable(fit, starts).to(rows.device)


def _has_zero_sum(evidence: Evidence) -> bool:
    """Return whether the rows of the head's gradient add up to 0, as they do for softmax unless a defense changed them.

    False if all entries are zero, or if any is NaN or infinite. With a single logit the sum cannot be checked; the result is then
    also False if `Evidence.shortened` is set, and True otherwise.
    """
    rows = add_negative_logit(evidence.gradient[evidence.weight])
    if len(evidence.gradient[evidence.weight]) == 1:
        return not evidence.shortened and bool(rows.isfinite().all() and rows.any())
    return bool(rows.isfinite().all() and rows.any() and rows.sum(dim=0).norm() <= MAX_ROW_SUM * rows.norm())


def _estimate_scale(bias: Tensor, guess: Tensor, examples: int) -> Tensor:
    """Return the factor by which the smallest estimated count becomes 0, at least 1; 1 if all counts are nearly integers."""
    counts, share = examples * (guess - bias), (bias / guess).max()
    whole_already = (counts - counts.round()).abs().max() < INTEGER_TOLERANCE
    return torch.where((share > 0) & (share < 1) & ~whole_already, 1 / share, 1)


def _is_bias_sent(evidence: Evidence) -> bool:
    """Return whether the head has a bias whose gradient was sent; a gradient of zeros counts as not sent."""
    return evidence.bias is not None and bool((evidence.gradient[evidence.bias] != 0).any())


def _get_bias_gradient(evidence: Evidence) -> Tensor:
    """Return the gradient (K,) of the head's bias, or an estimate if the head has no bias or its gradient was not sent.

    K is 2 for a single logit. The estimate needs `Evidence.head`, without which ValueError is raised. If a known defense left out
    some entries of the bias, those that were sent are kept, and the others are estimated from the rows; without
    `Evidence.head`, they stay 0.
    """
    if evidence.bias is not None and _is_bias_sent(evidence):
        bias = evidence.gradient[evidence.bias]
        if evidence.shortened and evidence.head is not None and not bias.all():
            guess = estimate_from_sent_entries(evidence.gradient[evidence.weight], evidence.head.features)
            bias = torch.where(bias == 0, guess, bias)
        return add_negative_logit(bias)
    if evidence.head is None:
        raise ValueError(
            "the last layer has no bias, or its gradient was not sent; set Evidence.head, a Head of the layer's weight, its bias "
            "(None without one) and its inputs for random examples, so that the gradient that a bias would have can be estimated"
        )
    return estimate_bias_gradient(add_negative_logit(evidence.gradient[evidence.weight]), evidence.head.features)


def _get_layer(head: Head) -> tuple[Tensor, Tensor]:
    """Return weight (K, F) and bias (K,) of the head, one row per class; a single logit becomes the classes 0 (zeros) and 1."""
    bias = torch.zeros_like(head.weight[:, 0]) if head.bias is None else head.bias
    if len(bias) > 1:
        return head.weight, bias
    return torch.cat([torch.zeros_like(head.weight), head.weight]), torch.cat([torch.zeros_like(bias), bias])


def add_negative_logit(slope: Tensor) -> Tensor:
    """Return a gradient with one row per class: `slope` (K, ...) itself, or (-slope, slope) of a single logit."""
    return slope if len(slope) > 1 else torch.cat([-slope, slope])


def _expand_counts(counts: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
