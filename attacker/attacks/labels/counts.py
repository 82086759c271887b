"""Estimation of the number of examples of each class (K,) from the gradient of the last layer, the head."""

from collections.abc import Sequence

import torch
from scipy.optimize import nnls
from torch import Tensor


def round_counts(counts: Tensor, examples: int) -> Tensor:
    """Round estimated counts (K,) to integers with the sum `examples`; negative counts become 0.

    Counts are scaled to the sum, and the largest remainders are rounded up. If no count is positive, or one is NaN or positive
    infinity, the examples are divided among all classes as equally as possible.
    """
    counts = counts.clamp(min=0)
    if not torch.isfinite(counts).all() or counts.sum() <= 0:  # the gradient is dominated by noise
        counts = torch.ones_like(counts)
    counts = counts * (examples / counts.sum())
    result = counts.floor().long()
    remaining = int(examples - result.sum())
    result[(counts - result).topk(remaining).indices] += 1
    return result


def choose_most_integer(estimates: Sequence[Tensor], examples: int) -> Tensor:
    """Return the counts (K,) of the estimate, one of (K,) each, that is nearest to its counts (`round_counts`)."""
    counts = [round_counts(estimate, examples) for estimate in estimates]
    errors = [(estimate - c).norm().nan_to_num(nan=torch.inf) for estimate, c in zip(estimates, counts, strict=True)]
    return counts[int(torch.stack(errors).argmin())]


def estimate_by_balance(bias: Tensor, guess: Tensor, examples: int) -> Tensor:
    """Return the counts (K,) n * (mean p_c - g_c), not rounded. bias: g. guess: mean probabilities p. examples: n."""
    return examples * (guess - bias)


def count_by_impact(sums: Tensor, examples: int) -> Tensor:
    """Return counts (K,) from the row sums (K,) of the gradient of the head's weight or from the gradient (K,) of its bias (LLG).

    Each class with a negative entry gets one example, the most negative first, as long as there are examples. An example is taken
    to lower the entry of its class by the impact: the total of all negative entries divided by n, times 1 + 1/K. The impact of
    each example given is subtracted from the entry, and the remaining examples are given, one after the other, to the class that
    then has the smallest entry. Source: Wainakh et al. 2022, algorithm 1.
    """
    sums = sums.clone()
    negative = sums.clamp(max=0).sum()
    impact = negative * (1 + 1 / len(sums)) / examples
    counts = torch.zeros(len(sums), dtype=torch.long, device=sums.device)
    first = sums.argsort()[: int((sums < 0).sum())][:examples]
    counts[first] += 1
    sums[first] -= impact
    for _ in range(examples - len(first)):
        lowest = sums.argmin()
        counts[lowest] += 1
        sums[lowest] -= impact
    return counts


def estimate_by_class_features(rows: Tensor, bias: Tensor, weight: Tensor, offset: Tensor, examples: int) -> Tensor:
    """Return counts (K,) from one feature vector per class, not rounded (Ma et al. 2023, iLRG).

    rows (K, F), bias (K,): gradients of the head's weight and bias. weight (K, F), offset (K,): the head's weight and bias.
    The ratio of row c to entry c of the bias's gradient serves as the features of all examples of class c, from which the
    predicted probabilities of these examples follow. The shares n_c / n, with sum 1, are then fitted to the bias's gradient by
    least squares. If a probability is not finite, n_c is -n g_c instead, g being the bias's gradient.
    """
    rows, bias, weight, offset = (t.double() for t in (rows, bias, weight, offset))
    features = rows / torch.where(bias == 0, torch.finfo(bias.dtype).tiny, bias)[:, None]
    p = (features @ weight.T + offset).softmax(dim=1)
    system = torch.cat([p.T - torch.eye(len(p), dtype=p.dtype, device=p.device), torch.ones_like(p[:1])])
    if not torch.isfinite(system).all():
        return -examples * bias
    shares: Tensor = torch.linalg.pinv(system) @ torch.cat([bias, torch.ones_like(bias[:1])])
    return examples * shares


def estimate_bias_gradient(rows: Tensor, features: Tensor) -> Tensor:
    """Estimate the gradient (K,) that a bias would have, for a head without one or whose bias gradient was not sent.

    rows: gradient of the head's weight, (K, F). features: inputs of the head for M random inputs of the network, (M, F). If a
    direction v fulfils f.v = 1 for the features f of all examples of the batch, then rows v is the bias's gradient. The direction
    is chosen such that over the given features f.v has the mean 1 and a small variance.
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


def solve_bias_gradient(slope: Tensor, weight: Tensor, guess: Tensor) -> Tensor:
    """Return the gradient g (K,) that a bias of the head would have, from the loss's derivatives by the head's inputs.

    slope: (F,), the derivatives by the inputs, summed over the examples, which equal weight^T g. The gradient of the bias of a
    linear layer directly before the head is this sum. weight: of the head, (K, F). guess: estimate of the mean predicted
    probabilities p (K,).

    With at least as many inputs as classes, g is the solution of least squares. With fewer, many g have these derivatives. Then g
    is p - c with shares of the classes c >= 0 of the sum 1 that fit best (non-negative least squares), since most classes have no
    example.
    """
    system, target = weight.double().T.cpu(), slope.double().cpu()
    if len(slope) >= len(weight):
        solution: Tensor = torch.linalg.lstsq(system, target).solution
        return solution.to(slope)
    p = guess.double().cpu()
    size = float(system.norm()) / len(p) ** 0.5  # typical norm of a column
    rows = torch.cat([system, torch.full_like(p, size)[None]]), torch.cat([system @ p - target, torch.full_like(p[:1], size)])
    shares, _ = nnls(*(t.numpy() for t in rows))
    return (p - torch.from_numpy(shares)).to(slope)


def estimate_from_sent_entries(rows: Tensor, features: Tensor) -> Tensor:
    """Estimate the gradient (K,) of the head's bias from rows of which some entries were not sent and are 0.

    Entry c is the factor b at which b times the mean of the features is nearest to row c in the entries that were sent (least
    squares). It is 0 for a row of which no entry was sent. rows, features: as for `estimate_bias_gradient`.
    """
    mean, sent = features.double().mean(dim=0), (rows != 0).double()
    power = sent @ mean.square()
    return ((rows.double() @ mean) / power.clamp(min=torch.finfo(power.dtype).tiny)).to(rows.dtype)
