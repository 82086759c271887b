"""How many examples of each class are behind a gradient, from the size of the head's entries alone."""

import torch
from torch import Tensor


def whole(counts: Tensor, examples: int) -> Tensor:
    """(K,) int64 that add up to `examples`, from real numbers in about these shares; negative ones are 0.

    The largest remainders are rounded up. Where nothing is positive, or anything not finite, all classes share alike.
    """
    counts = counts.clamp(min=0)
    if not torch.isfinite(counts).all() or counts.sum() <= 0:  # noise has the last word
        counts = torch.ones_like(counts)
    counts = counts * (examples / counts.sum())
    result = counts.floor().long()
    remaining = int(examples - result.sum())
    result[(counts - result).topk(remaining).indices] += 1
    return result


def by_balance(bias: Tensor, guess: Tensor, examples: int) -> Tensor:
    """(K,) `n * (mean p_c - g_c)` in whole numbers, from the bias's gradient g (K,) and a guess of the mean probabilities (K,).

    It is the gradient solved for the counts: exact where the guess is.
    """
    return whole(examples * (guess - bias), examples)


def by_impact(sums: Tensor, examples: int) -> Tensor:
    """(K,) counts from the row sums of the head's gradient, or from its bias's (Wainakh et al. 2022, LLG, algorithm 1).

    Every class with a negative sum is there once, the most negative first. An example lowers its class's sum by the impact, which
    is the sum of all negative ones over n, times 1 + 1/K; what is left is given to whichever class then has the smallest.
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


def by_class_features(rows: Tensor, bias: Tensor, weight: Tensor, offset: Tensor, examples: int) -> Tensor:
    """(K,) counts from one feature a class (Ma et al. 2023, iLRG).

    rows (K, F), bias (K,): the head's gradient; weight (K, F), offset (K,): the head itself. Row c over entry c is taken for the
    features of every example of class c, whose probabilities follow; the n_c / n that give the bias's gradient and add up to 1
    are the least-squares ones.
    """
    rows, bias, weight, offset = (t.double() for t in (rows, bias, weight, offset))
    features = rows / torch.where(bias == 0, torch.finfo(bias.dtype).tiny, bias)[:, None]
    p = (features @ weight.T + offset).softmax(dim=1)
    system = torch.cat([p.T - torch.eye(len(p), dtype=p.dtype, device=p.device), torch.ones_like(p[:1])])
    if not torch.isfinite(system).all():
        return whole(-bias, examples)
    return whole(examples * (torch.linalg.pinv(system) @ torch.cat([bias, torch.ones_like(bias[:1])])), examples)


def stand_in_bias(rows: Tensor, features: Tensor) -> Tensor:
    """(K,), about what the bias's gradient would be, from the head's gradient rows (K, F) and features (M, F) of any inputs.

    The direction v with mean f.v = 1 over those features and the least variance: where f.v is 1 for all examples, rows v is the
    bias's gradient.
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
