"""Checks of a model's weights for patterns by which published attacks of malicious servers make updates reveal examples.

Clients can check the weights that a server sends before they train. Random and trained weights usually show no such pattern.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.models.imprint_layers import find_parallel_rows, have_different_thresholds
from fedsim.models.inspected_layers import (
    MIN_COLUMNS,
    MIN_ROWS,
    InspectedLayer,
    find_embeddings,
    is_large,
    list_layers,
    read_weights,
    spread_rows,
)

MAX_DEPTHWISE_KERNEL = 49
"""Largest number of values of a filter of one channel, 7x7, whose parallel rows are ignored: they may see different channels."""
MIN_MIRRORED_SHARE = 0.25
"""Share of a layer's rows above which trap weights are reported."""
MAX_INPUT = 3.0
"""Largest absolute input of a neuron that is assumed: three standard deviations of normalised data."""
SUSPICIOUS_SHARE = 0.9
"""Share of a layer's rows above which dead neurons and copying filters, which are recognised row by row, are reported."""
MIN_RARE_DISTANCE, MAX_RARE_DEVIATION = 1.2, 0.2
"""Smallest distance of a rarely active neuron's threshold from 0, in units of the norm of its weights, and largest relative
standard deviation of the distances of a layer. For batches of 16 the published distance is 1.5."""
DOMINANT = 1e3
"""Ratio of the norm of one row or column of a weight to every other from which it is the only one that counts."""
MIN_BIAS_GAP = 50.0
"""Smallest difference of the biases of switched-off classes from those of the others; the published one is 1,000."""
MIN_FEATURES = 8
"""Smallest number of columns of a head that is inspected for a single feature."""
MAX_COPY_DEVIATION = 0.01
"""Largest relative difference of the values of filters that copy, in a convolution whose other filters are zero."""
MIN_NEURONS_PER_FEATURE = 4
"""Smallest number of neurons per input of a wide layer; the error of features that are recovered behind it falls with the root of
this number."""
MAX_KURTOSIS_ERROR = 0.3
"""Largest difference of the kurtosis of weights from 3, that of a normal distribution; a uniform one has 1.8."""
MAX_MEAN = 0.1
"""Largest absolute mean of normally distributed weights, relative to their standard deviation."""
MIN_COMPARED = 512
"""Smallest number of weights of another linear layer that tells whether the network's own weights are normally distributed."""
MIRROR_ERROR = 0.02
"""Largest relative deviation of the ratios between the sorted positive and negative values of a row that was mirrored."""
MIN_MIRROR_FACTOR = 1e-3
"""Smallest difference of the mean of these ratios from 1. Rows of antisymmetric filters, such as cosines and wavelets, have
ratios of 1; trap weights are scaled, since otherwise they would react to half of all inputs."""
MAX_PAIRED_ROWS, MAX_PAIRED_VALUES, MAX_FACTORS = 64, 512, 32
"""Largest number of rows that are examined for trap weights, and of their values and factors for values that are multiples."""
PAIR_ERROR, MIN_FACTOR, MAX_PAIRED_DEVIATION = 5e-7, 0.55, 0.1
"""Largest relative rounding error of such a multiple, smallest factor, and largest deviation of the share of values with a
multiple from one half. In a geometric sequence nearly all values have one."""


@dataclass(frozen=True)
class Tampering:
    """One sign of tampering in one weight of a model.

    layer: name of the weight, such as "0.weight". pattern: short name of the pattern. evidence: what was found, in words.
    """

    layer: str
    pattern: str
    evidence: str


def inspect_model(model: nn.Module) -> list[Tampering]:
    """Return a list of signs of tampering in the weights of a model, such as one that a server has just sent.

    The patterns: layers in which many rows are parallel and have different thresholds, as in imprint layers (Fowl et al. 2022,
    "Robbing the Fed"); rows that hold the same values positive and negative, up to a factor (Boenisch et al. 2023, "When the
    curious abandon honesty"); a first layer whose neurons nearly never react (Nowak et al. 2024, "QBI"); biases so negative that
    neurons or normalised channels never react (Pasquini et al. 2022, "Eluding secure aggregation"); a linear layer in which the
    row of one class, or the column of one feature, dominates, or whose biases switch classes off (Wen et al. 2022, "Fishing for
    user data"); convolutions that only copy their input (Zhao et al. 2024, "LOKI"); and a wide layer of random Gaussian weights
    before the last one (Liu et al. 2024, "Data reconstruction attacks and defenses").
    An empty list does not prove that the server is honest. Raises ValueError if `model` is no module or has no values yet.
    """
    return list(inspect_weights(read_weights(model), looked_up=find_embeddings(model)))


def inspect_weights(weights: Mapping[str, Tensor], *, looked_up: frozenset[str] = frozenset()) -> Iterator[Tampering]:
    """Yield the signs of tampering in weights, given by parameter name, for the patterns of `inspect_model`.

    looked_up: names of embeddings. These may be the weights of the last layer as well, and those of symbols that never occur
    are equal, so that parallel rows are no sign there.
    Without its bias, see `list_layers`, a layer is not inspected for imprint layers and for neurons that hardly ever react.
    Layers that copy their input do not count as the first one.
    """
    first = True
    matrices: dict[str, Tensor] = {}
    for layer in list_layers(weights):
        copying = list(_inspect_convolution(layer))
        if layer.name not in looked_up:
            yield from _inspect_imprint(layer)
        yield from _inspect_rows(layer)
        yield from copying
        yield from _inspect_head(layer)
        if first and not copying:
            yield from _inspect_first(layer)
            first = False
        if layer.weight.ndim == 2 and min(layer.weight.shape) > 1:
            matrices[layer.name] = layer.weight
    yield from _inspect_normalisations(weights)
    heads = list(matrices)
    if len(heads) > 1 and heads[-2] != next(iter(matrices)) and f"{heads[-2].removesuffix('weight')}bias" not in weights:
        yield from _inspect_wide_layer(heads[-2], list(matrices.values()))


def _inspect_imprint(layer: InspectedLayer) -> Iterator[Tampering]:
    if layer.bias is None or layer.weight[0].numel() < MIN_COLUMNS or _is_depthwise(layer):
        return
    weight = layer.rows
    rows = find_parallel_rows(weight)
    if len(rows) and have_different_thresholds(weight[rows], layer.bias[rows]):
        words = f"{len(rows)} of the rows that were compared are parallel, and have different thresholds"
        yield Tampering(layer.name, "imprint layer", words)


def _inspect_rows(layer: InspectedLayer) -> Iterator[Tampering]:
    if not is_large(layer.weight):
        return
    weight, bias = layer.rows, layer.bias
    if (share := max(compute_mirrored_share(weight), compute_paired_share(weight))) > MIN_MIRRORED_SHARE:
        words = f"{share:.0%} of the rows hold the same values twice, once positive and once negative, up to a factor"
        yield Tampering(layer.name, "trap weights", words)
    if bias is not None:
        dead = bias < -MAX_INPUT * weight.abs().sum(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        if (share := float(dead.double().mean())) > SUSPICIOUS_SHARE:
            words = f"{share:.0%} of the biases are so negative that no usual input activates their neurons"
            yield Tampering(layer.name, "dead neurons", words)


def _is_depthwise(layer: InspectedLayer) -> bool:
    """Return whether each filter of a small kernel sees one channel only, possibly one of its own, as in filters that blur."""
    return layer.weight.ndim > 2 and layer.weight.shape[1] == 1 and layer.weight[0].numel() <= MAX_DEPTHWISE_KERNEL


def _inspect_first(layer: InspectedLayer) -> Iterator[Tampering]:
    """Yield a sign of tampering if nearly all neurons of a first layer react to few inputs only, all about equally rarely."""
    if layer.bias is None or not is_large(layer.weight):
        return
    distance = -layer.bias / layer.rows.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    far = distance > MIN_RARE_DISTANCE
    even = float(distance[far].std()) <= MAX_RARE_DEVIATION * float(distance[far].mean()) if int(far.sum()) > 1 else False
    if even and (share := float(far.double().mean())) > SUSPICIOUS_SHARE:
        words = f"{share:.0%} of the neurons of the first layer react to few inputs only, all of them about equally rarely"
        yield Tampering(layer.name, "rarely active neurons", words)


def _inspect_normalisations(weights: Mapping[str, Tensor]) -> Iterator[Tampering]:
    """Yield a sign of tampering for each normalisation whose biases turn off nearly all of its channels behind ReLU."""
    for name, weight in weights.items():
        bias = weights.get(f"{name.removesuffix('weight')}bias")
        if (
            not name.endswith("weight")
            or weight.ndim != 1
            or bias is None
            or bias.shape != weight.shape
            or len(weight) < MIN_ROWS
        ):
            continue
        dead = bias.detach().double() < -MAX_INPUT * weight.detach().double().abs().clamp(min=torch.finfo(torch.float32).tiny)
        if (share := float(dead.double().mean())) > SUSPICIOUS_SHARE:
            words = f"{share:.0%} of the biases are so negative that their channels are never positive"
            yield Tampering(name, "dead neurons", words)


def _inspect_convolution(layer: InspectedLayer) -> Iterator[Tampering]:
    """Yield a sign of tampering if more than the share `SUSPICIOUS_SHARE` of the filters have one single non-zero value.

    Such a filter only multiplies one channel of its input by a number and shifts it by some pixels. If other filters are zero, as
    those for other clients are, the values of the filters must be equal, since pruning also leaves single values. Convolutions of
    1x1, or with less than three filters, are not inspected.
    """
    weight = layer.weight
    if weight.ndim != 4 or weight[0, 0].numel() < 2 or len(weight) < 3:
        return
    values = layer.rows
    count = (values != 0).sum(dim=1)
    single, used = int((count == 1).sum()), int((count > 0).sum())
    if single <= SUSPICIOUS_SHARE * used or used < 2:
        return
    sizes = values.abs().amax(dim=1)[count == 1]
    if used == len(weight) or float(sizes.max() - sizes.min()) <= MAX_COPY_DEVIATION * float(sizes.max()):
        words = f"{single} of {used} filters that are not zero copy one pixel of one channel"
        yield Tampering(layer.name, "copying convolution", words)


def _inspect_head(layer: InspectedLayer) -> Iterator[Tampering]:
    """Yield signs of tampering if a linear layer, or a 1x1 convolution, has a single row or column that counts, or few classes.

    Layers with less than three rows are not inspected. A layer has few classes if the biases of rows that are zero are above
    those of the other rows by `MIN_BIAS_GAP`.
    """
    if layer.weight[0, 0].numel() > 1 or len(layer.weight) < 3:
        return
    weight = layer.rows
    norms, columns = weight.norm(dim=1), weight.norm(dim=0)
    if not bool(norms.max() > 0):
        return
    zero = norms == 0
    if int((norms * DOMINANT >= norms.max()).sum()) == 1:
        words = f"the norm of the row of class {int(norms.argmax())} is over 1,000 times that of every other row"
        yield Tampering(layer.name, "head of a single class", words)
    elif len(columns) >= MIN_FEATURES and int((columns * DOMINANT >= columns.max()).sum()) == 1:
        words = f"the weights of feature {int(columns.argmax())} are over 1,000 times those of every other feature"
        yield Tampering(layer.name, "head of a single feature", words)
    elif layer.bias is not None and bool(zero.any()) and float(layer.bias[zero].min() - layer.bias[~zero].max()) > MIN_BIAS_GAP:
        words = f"large biases switch off {int(zero.sum())} rows, whose weights are zero"
        yield Tampering(layer.name, "head of few classes", words)


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


def compute_mirrored_share(weight: Tensor) -> float:
    """Return the share of rows that hold about the same values twice, once positive and once negative, up to a factor.

    Half of the values of such a row are positive, and half negative. The ratio of the k-th largest magnitude among the negative
    values to the k-th largest positive value is nearly the same for all k, and differs from 1 by `MIN_MIRROR_FACTOR` on average.
    With an odd number of values, the middle one is ignored. At most `MAX_PAIRED_ROWS` rows, evenly spread, are examined.
    """
    rows = spread_rows(weight, MAX_PAIRED_ROWS)
    half = rows.shape[1] // 2
    ordered = rows.sort(dim=1).values
    negative, positive = -ordered[:, :half], ordered.flip(1)[:, :half]
    ratio = negative / positive.clamp(min=torch.finfo(torch.float64).tiny)
    even = (negative > 0).all(dim=1) & (positive > 0).all(dim=1)
    mean = ratio.mean(dim=1)
    same = (ratio.std(dim=1) < MIRROR_ERROR * mean) & ((mean - 1).abs() > MIN_MIRROR_FACTOR)
    return float((even & same).double().mean())


def compute_paired_share(weight: Tensor) -> float:
    """Return the share of rows in which every second value is another value of the row, times a factor that is the same for all.

    These are trap weights whose values have any sign before they are copied. The factors that are tried are the ratios of the
    largest magnitudes of the row to the largest one. At most `MAX_PAIRED_ROWS` rows and `MAX_PAIRED_VALUES` values of each are
    examined. Float32 weights only: in lower precision, many values are multiples of others by chance.
    """
    ordered = spread_rows(weight, MAX_PAIRED_ROWS).abs().sort(dim=1).values
    largest, values = ordered[:, -1:], spread_rows(ordered.T, MAX_PAIRED_VALUES).T
    found = torch.zeros(len(ordered), dtype=torch.bool, device=weight.device)
    for place in range(2, min(MAX_FACTORS, ordered.shape[1] - 1) + 2):
        factor = ordered[:, -place, None] / largest.clamp(min=torch.finfo(torch.float64).tiny)
        wanted = values * factor
        after = torch.searchsorted(ordered, wanted.contiguous()).clamp(1, ordered.shape[1] - 1)
        gap = torch.minimum((ordered.gather(1, after) - wanted).abs(), (ordered.gather(1, after - 1) - wanted).abs())
        share = ((gap <= PAIR_ERROR * wanted) & (wanted > 0)).double().mean(dim=1)
        suitable = ((factor > MIN_FACTOR) & (factor < 1 - MIN_MIRROR_FACTOR))[:, 0]
        found |= suitable & ((share - 0.5).abs() <= MAX_PAIRED_DEVIATION)
    return float(found.double().mean())
