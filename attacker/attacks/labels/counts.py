"""Estimation of the number of examples of each class (K,) from the gradient of the last layer, the head."""

import torch
from torch import Tensor


def round_counts(counts: Tensor, examples: int) -> Tensor:
    """Round estimated counts (K,) to integers with the sum `examples`; negative counts become 0.

    Counts are scaled to the sum, and the largest remainders are rounded up. If no count is positive, or one is not finite, all
    classes get equal counts.
    """
    counts = counts.clamp(min=0)
    if not torch.isfinite(counts).all() or counts.sum() <= 0:  # the gradient is dominated by noise
        counts = torch.ones_like(counts)
    counts = counts * (examples / counts.sum())
    result = counts.floor().long()
    remaining = int(examples - result.sum())
    result[(counts - result).topk(remaining).indices] += 1
    return result


def count_by_balance(bias: Tensor, guess: Tensor, examples: int) -> Tensor:
    """Return counts (K,) from the gradient g of the bias: `n * (mean p_c - g_c)`, rounded to integers.

    bias: the gradient (K,). guess: estimate of the mean predicted probabilities p (K,). The counts are exact if the guess is.
    """
    return round_counts(examples * (guess - bias), examples)


def count_by_impact(sums: Tensor, examples: int) -> Tensor:
    """Return counts (K,) from the row sums (K,) of the head's gradient, or from that of its bias (LLG, algorithm 1).

    Each class with a negative sum gets one example, the most negative first. An example lowers the sum of its class by the
    impact: the total of all negative sums divided by n, times 1 + 1/K. This is subtracted, and the remaining examples are
    given, one after the other, to the class that then has the smallest sum. Source: Wainakh et al. 2022.
    """
    sums = sums.clone()
    negative = sums.clamp(max=0).sum()
    impact = negative * (1 + 1 / len(sums)) / examples
    counts = torch.zeros(len(sums), dtype=torch.long, device=sums.device)
    first = sums.argsort()[: int((sums < 0).sum())][:examples]
    counts[first] += 1
    sums[first] -= impact
    for _ in range(examples - len(first)):
        least = sums.argmin()
        counts[least] += 1
        sums[least] -= impact
    return counts


def count_by_class_features(rows: Tensor, bias: Tensor, weight: Tensor, offset: Tensor, examples: int) -> Tensor:
    """Return counts (K,) from one feature vector per class (Ma et al. 2023, iLRG).

    rows (K, F), bias (K,): gradient of the head. weight (K, F), offset (K,): the head's weights and bias. The ratio of row c to
    entry c of the bias's gradient serves as the features of all examples of class c, from which their probabilities follow. The
    shares n_c / n, with sum 1, are then fitted to the bias's gradient by least squares.
    """
    rows, bias, weight, offset = (t.double() for t in (rows, bias, weight, offset))
    features = rows / torch.where(bias == 0, torch.finfo(bias.dtype).tiny, bias)[:, None]
    p = (features @ weight.T + offset).softmax(dim=1)
    system = torch.cat([p.T - torch.eye(len(p), dtype=p.dtype, device=p.device), torch.ones_like(p[:1])])
    if not torch.isfinite(system).all():
        return round_counts(-bias, examples)
    return round_counts(examples * (torch.linalg.pinv(system) @ torch.cat([bias, torch.ones_like(bias[:1])])), examples)


def estimate_bias_gradient(rows: Tensor, features: Tensor) -> Tensor:
    """Estimate the gradient (K,) that a bias would have, for a head without one.

    rows: gradient of the head, (K, F). features: those of M random examples, (M, F). If a direction v fulfils f.v = 1 for the
    features f of all examples, then rows v is the bias's gradient. The direction with mean f.v = 1 and least variance over the
    given features is used.
    """
    features = features.double()
    mean = features.mean(dim=0)
    _, s, basis = torch.linalg.svd(features - mean, full_matrices=False)
    variance = s.square() / len(features)
    floor = variance.mean() + 1e-12
    inside = basis @ mean
    v = mean / floor + basis.T @ (inside / (variance + 1e-3 * floor) - inside / floor)
    estimate: Tensor = rows.double() @ (v / (mean @ v))
    return estimate.to(rows.dtype)
