"""Checks of a model's weights for patterns by which published attacks of malicious servers make updates reveal examples.

Clients can check the weights that a server sends before they train. Random and trained weights usually show no such pattern.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MIN_ROWS, MIN_COLUMNS = 16, 8
"""Smallest layer that is inspected."""
MAX_ROWS = 1024
"""Largest number of rows of a layer that are compared with each other."""
PARALLEL_COSINE = 0.999
"""Absolute cosine of two rows above which they measure the same quantity."""
MAX_PARALLEL_SHARE = 0.5
"""Largest share of parallel pairs of rows in a layer of an honest server."""
MIRROR_ERROR = 0.02
"""Largest relative deviation of the ratios between the sorted positive and negative values of a row that was mirrored."""
MAX_INPUT = 3.0
"""Largest absolute input of a neuron that is assumed: three standard deviations of normalised data."""
SUSPICIOUS_SHARE = 0.9
"""Share of a layer's rows above which trap weights or dead neurons, which are recognised row by row, are reported."""
MIN_NEURONS_PER_FEATURE = 4
"""Smallest number of neurons per input of a wide layer; the error of features that are recovered behind it falls with the root of
this number."""
MAX_KURTOSIS_ERROR = 0.3
"""Largest difference of the kurtosis of weights from 3, that of a normal distribution; a uniform one has 1.8."""
MAX_MEAN = 0.1
"""Largest absolute mean of normally distributed weights, relative to their standard deviation."""
MIN_COMPARED = 512
"""Smallest number of weights of another linear layer that tells whether the network's own weights are normally distributed."""


@dataclass(frozen=True)
class Tampering:
    """One sign of tampering in one weight of a model.

    layer: name of the weight, such as "0.weight". pattern: short name of the pattern. evidence: what was found, in words.
    """

    layer: str
    pattern: str
    evidence: str


@dataclass(frozen=True)
class ImprintLayer:
    """A linear layer in which each neuron compares (nearly) the same linear function of the input with a threshold of its own.

    weight, bias: names of its parameters. direction: unit vector (n,); the function is its inner product with the input (n,).
    order: indices (k,) of the k neurons by increasing threshold. thresholds: the thresholds (k,) in this order.
    """

    weight: str
    bias: str
    direction: Tensor
    order: Tensor
    thresholds: Tensor


def inspect_model(model: nn.Module) -> list[Tampering]:
    """Return a list of signs of tampering in the weights of a model, such as one that a server has just sent.

    The patterns: layers whose rows are mostly parallel, as in imprint layers (Fowl et al. 2022, "Robbing the Fed"); rows that
    hold the same values positive and negative (Boenisch et al. 2023, "When the curious abandon honesty"); biases so negative that
    neurons never react (Pasquini et al. 2022, "Eluding secure aggregation"); a last linear layer in which the row of one class
    dominates (Wen et al. 2022, "Fishing for user data"); convolutions that only copy their input (Zhao et al. 2024, "LOKI"); and
    a wide layer of random Gaussian weights before the last one (Liu et al. 2024, "Data reconstruction attacks and defenses").
    An empty list does not prove that the server is honest.
    """
    return list(inspect_weights({name: p.detach() for name, p in model.named_parameters()}))


def inspect_weights(weights: Mapping[str, Tensor]) -> Iterator[Tampering]:
    """Yield the signs of tampering in weights, given by parameter name, for the patterns of `inspect_model`.

    Only parameters of two or more dimensions whose names end in "weight" are inspected, each with its bias (the same name with
    "bias") if `weights` has it; without biases, neurons that never react are not found. The last of these parameters with exactly
    two dimensions is taken for the weight of the last linear layer.
    """
    matrices = {name: w.detach() for name, w in weights.items() if name.endswith("weight") and w.ndim >= 2}
    for name in matrices:
        weight = matrices[name].flatten(1).double()
        bias = weights.get(f"{name.removesuffix('weight')}bias")
        if is_large(weight):
            yield from _inspect_rows(name, weight, None if bias is None else bias.detach().double())
        if matrices[name].ndim == 4:
            yield from _inspect_convolution(name, matrices[name].double())
    heads = [name for name, w in matrices.items() if w.ndim == 2]
    if heads:
        yield from _inspect_head(heads[-1], matrices[heads[-1]].double())
    if len(heads) > 1 and heads[-2] != next(iter(matrices)) and f"{heads[-2].removesuffix('weight')}bias" not in weights:
        yield from _inspect_wide_layer(heads[-2], [matrices[name] for name in heads])


def is_large(weight: Tensor) -> bool:
    """Return whether a weight has at least `MIN_ROWS` rows of at least `MIN_COLUMNS` values each, enough to compare its rows."""
    return weight.ndim >= 2 and len(weight) >= MIN_ROWS and weight[0].numel() >= MIN_COLUMNS


def _inspect_rows(name: str, weight: Tensor, bias: Tensor | None) -> Iterator[Tampering]:
    if (share := compute_parallel_share(weight)) > MAX_PARALLEL_SHARE:
        yield Tampering(name, "imprint layer", f"{share:.0%} of the pairs of rows are parallel")
    if (share := _compute_mirrored_share(weight)) > SUSPICIOUS_SHARE:
        yield Tampering(
            name,
            "trap weights",
            f"{share:.0%} of the rows hold the same values twice, once positive and once negative, up to a factor",
        )
    if bias is not None and len(bias) == len(weight):
        dead = bias < -MAX_INPUT * weight.abs().sum(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        if (share := float(dead.double().mean())) > SUSPICIOUS_SHARE:
            yield Tampering(
                name, "dead neurons", f"{share:.0%} of the biases are so negative that no usual input activates their neurons"
            )


def compute_parallel_share(weight: Tensor) -> float:
    """Return the share of pairs of rows whose absolute cosine is above `PARALLEL_COSINE`, among the rows that are not zero.

    Only the first `MAX_ROWS` rows are compared, each of them flattened. The share is 0 for less than two rows.
    """
    rows = weight.flatten(1)[:MAX_ROWS].double()
    rows = rows[rows.norm(dim=1) > 0]
    if len(rows) < 2:
        return 0.0
    rows = rows / rows.norm(dim=1, keepdim=True)
    pairs = len(rows) * (len(rows) - 1)
    return float((torch.triu((rows @ rows.T).abs(), diagonal=1) > PARALLEL_COSINE).sum()) * 2 / pairs


def _compute_mirrored_share(weight: Tensor) -> float:
    """Return the share of rows that hold about the same values twice, once positive and once negative, up to a factor.

    Half of the values of such a row are positive, and half negative. The ratio of the k-th largest magnitude among the negative
    values to the k-th largest positive value is nearly the same for all k. With an odd number of values, the middle one is
    ignored. Only the first `MAX_ROWS` rows are examined.
    """
    rows = weight[:MAX_ROWS]
    half = rows.shape[1] // 2
    ordered = rows.sort(dim=1).values
    negative, positive = -ordered[:, :half], ordered.flip(1)[:, :half]
    ratio = negative / positive.clamp(min=torch.finfo(torch.float64).tiny)
    even = (negative > 0).all(dim=1) & (positive > 0).all(dim=1)
    return float((even & (ratio.std(dim=1) < MIRROR_ERROR * ratio.mean(dim=1))).double().mean())


def _inspect_convolution(name: str, weight: Tensor) -> Iterator[Tampering]:
    """Yield a sign of tampering if more than the share `SUSPICIOUS_SHARE` of the filters have one single non-zero value.

    Such a filter only multiplies one channel of its input by a number and shifts it by some pixels. Convolutions of 1x1, or with
    less than three filters, are not inspected.
    """
    if weight[0, 0].numel() < 2 or len(weight) < 3:
        return
    share = float(((weight != 0).flatten(1).sum(dim=1) == 1).double().mean())
    if share > SUSPICIOUS_SHARE:
        yield Tampering(name, "copying convolution", f"{share:.0%} of the filters copy one pixel of one channel")


def _inspect_head(name: str, weight: Tensor) -> Iterator[Tampering]:
    """Yield a sign of tampering if the norm of one row of the head's weight is over 1,000 times that of every other row.

    Heads with less than three rows are not inspected.
    """
    norms = weight.norm(dim=1)
    if len(norms) < 3 or not bool(norms.max() > 0):
        return
    rest = norms.sort(descending=True).values[1]
    if float(rest) < 1e-3 * float(norms.max()):
        words = f"the norm of the row of class {int(norms.argmax())} is over 1,000 times that of every other row"
        yield Tampering(name, "head of a single class", words)


def _inspect_wide_layer(name: str, matrices: Sequence[Tensor]) -> Iterator[Tampering]:
    """Yield a sign of tampering if the last but one linear layer is wide, and it alone has normally distributed weights.

    Wide means at least `MIN_NEURONS_PER_FEATURE` outputs per input. If another linear layer with `MIN_COMPARED` or more weights
    has normally distributed weights as well, then the network's own initialisation may be normal, and no sign is yielded.
    name: name of the wide layer's weight; the caller ensures that the layer has no bias and is not the first of the network.
    matrices: weights of all linear layers, in order.
    """
    *others, wide, head = matrices
    fits = is_large(wide) and len(wide) == head.shape[1] and len(wide) >= MIN_NEURONS_PER_FEATURE * wide.shape[1]
    if fits and is_gaussian(wide) and not any(is_gaussian(w) for w in (*others, head) if w.numel() >= MIN_COMPARED):
        words = f"{len(wide)} neurons without bias, with normally distributed weights, for {wide.shape[1]} features"
        yield Tampering(name, "wide Gaussian layer", f"{words}, which the last layer's gradient then reveals")


def is_gaussian(weight: Tensor) -> bool:
    """Return whether the values of a weight look normally distributed with a mean near 0, by their mean and kurtosis."""
    w = weight.detach().double()
    std = w.std()
    if not float(std) > 0 or float(w.mean().abs()) > MAX_MEAN * float(std):
        return False
    return abs(float(((w - w.mean()) / std).pow(4).mean()) - 3) <= MAX_KURTOSIS_ERROR


def find_imprint(weights: Mapping[str, Tensor], inputs: int) -> ImprintLayer | None:
    """Return the first linear layer with `inputs` columns, a bias, and rows that are nearly positive multiples of one vector.

    weights: by parameter name. The cosine of every row with the first one must be at least `PARALLEL_COSINE`, and there must be
    at least `MIN_ROWS` rows, none of them zero. Returns None if there is no such layer.
    """
    for name, weight in weights.items():
        bias_name = f"{name.removesuffix('weight')}bias"
        if not name.endswith("weight") or bias_name not in weights or weight.ndim != 2 or weight.shape[1] != inputs:
            continue
        rows = weight.detach().double()
        norms = rows.norm(dim=1)
        if len(rows) < MIN_ROWS or not bool((norms > 0).all()):
            continue
        direction = rows[0] / norms[0]
        if bool((rows @ direction / norms < PARALLEL_COSINE).any()):
            continue
        thresholds = -weights[bias_name].detach().double() / norms
        order = thresholds.argsort()
        return ImprintLayer(name, bias_name, direction, order, thresholds[order])
    return None
