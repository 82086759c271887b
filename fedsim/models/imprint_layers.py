"""Imprint layers: linear layers whose neurons compare the same linear function of the input with different thresholds."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.models.inspected_layers import MIN_ROWS, spread_rows

MAX_ROWS = 1024
"""Largest number of rows of a layer that are compared with each other."""
PARALLEL_COSINE = 0.999
"""Cosine of two rows above which they measure the same quantity."""
MIN_PARALLEL, MIN_PARALLEL_SHARE = 8, 0.25
"""Smallest number of parallel rows of an imprint layer, and smallest share of the layer's rows that are not zero."""
MIN_THRESHOLD_SPAN = 0.02
"""Smallest difference of the thresholds of parallel rows, from the 5 % to the 95 % quantile, relative to the largest one."""
MIN_THRESHOLD_RATIO = 50.0
"""Smallest ratio of this difference to the root mean square distance of the rows' unit vectors from their mean. Training can make
rows nearly parallel, and then their thresholds differ about as much as their directions."""
MIN_THRESHOLD_STEP = 0.05
"""Smallest difference of two thresholds that count as different, in units of this span divided by the number of rows."""


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


def find_parallel_rows(weight: Tensor) -> Tensor:
    """Return the indices (k,) of the largest group of rows that are nearly positive multiples of each other; none if it is small.

    At most `MAX_ROWS` rows that are not zero are compared, evenly spread over the weight, each of them flattened. A group is
    small if it has fewer than `MIN_PARALLEL` rows, or less than the share `MIN_PARALLEL_SHARE` of the compared ones.
    """
    rows = weight.flatten(1).double()
    kept = (rows.norm(dim=1) > 0).nonzero()[:, 0]
    kept = spread_rows(kept, MAX_ROWS)
    unit = torch.nn.functional.normalize(rows[kept], dim=1)
    parallel = unit @ unit.T > PARALLEL_COSINE
    count = parallel.sum(dim=1)
    if not len(kept) or int(count.max()) < max(MIN_PARALLEL, MIN_PARALLEL_SHARE * len(kept)):
        return kept[:0]
    return kept[parallel[count.argmax()]]


def have_different_thresholds(weight: Tensor, bias: Tensor) -> bool:
    """Return whether at least half of the parallel rows (k, F) have thresholds that differ from those of the others.

    bias: (k,). The threshold of a row is the value of its unit vector's inner product with an input at which its output is 0.
    """
    thresholds = (-bias.double() / weight.double().norm(dim=1)).sort().values
    low, high = thresholds.quantile(0.05), thresholds.quantile(0.95)
    unit = torch.nn.functional.normalize(weight.double(), dim=1)
    apart = (unit - unit.mean(dim=0)).square().sum(dim=1).mean().sqrt()
    if not float(high - low) > max(MIN_THRESHOLD_SPAN * float(thresholds.abs().max()), MIN_THRESHOLD_RATIO * float(apart)):
        return False
    steps = thresholds.diff() > MIN_THRESHOLD_STEP * (high - low) / len(thresholds)
    return int(steps.sum()) + 1 >= len(thresholds) / 2


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
