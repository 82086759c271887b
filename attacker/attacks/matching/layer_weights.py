"""Weights of layers, or of single entries, in the distance between gradients (AGIC, section IV-C; FedLeak)."""

from collections.abc import Callable, Mapping
from math import ceil, exp, log

import torch
from torch import Tensor, nn

LayerWeights = Callable[[nn.Module, Mapping[str, Tensor]], dict[str, Tensor]]
"""Maps the model and the observed gradient to a dict from the name of each tensor of the gradient to a weight, 0-d, or to weights
of the tensor's entries, in its shape."""

MODIFIER_CAP = 1e3
"""Largest factor by which zeros in a layer's gradient increase its weight, which would be infinite for a layer of zeros."""

MIN_MEAN_SQUARE = 1e-8
"""Smallest mean square of a tensor that `weigh_relatively` divides by, as a share of the mean square over all tensors."""

DEPTH_SHAPES: dict[str, Callable[[float], float]] = {"constant": lambda i: 0.0, "linear": lambda i: i, "log": log, "exp": exp}
"""The shape of the weight as a function of the convolution's number i = 1, 2, ... `weigh_by_depth` scales and shifts it, so that
the weight runs from 1 to beta; AGIC's table I has increasing and decreasing weights."""


def weigh_relatively(observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return for each tensor the weight 1 / (n * mean square of the tensor's entries) of its squared norm.

    n is the number of entries of all tensors, so that the weighted sum of the squared norms of `observed` is 1. A mean square
    below MIN_MEAN_SQUARE times the mean square of all entries is replaced by this limit; the sum is then smaller.
    """
    count = sum(g.numel() for g in observed.values())
    whole = torch.stack([g.square().sum() for g in observed.values()]).sum()
    minimum = MIN_MEAN_SQUARE * whole / count + torch.finfo(whole.dtype).tiny
    return {name: 1 / (count * g.square().mean().maximum(minimum)) for name, g in observed.items()}


def weigh_by_norm(observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weight 1 / (T * squared norm) for each of the T tensors, so that all have equal parts of the objective.

    Without these weights, tensors with large gradients dominate the cosine distance. Small norms are replaced by a lower limit,
    as in `weigh_relatively`.
    The idea is from Liu et al. 2024, appendix F. Its formula is not legible in the copy that was used, so the weights may differ.
    """
    relative = weigh_relatively(observed)
    count = sum(g.numel() for g in observed.values())
    return {name: w * count / (len(observed) * observed[name].numel()) for name, w in relative.items()}


def keep_largest(share: float) -> LayerWeights:
    """Return a function that gives the largest entries of each observed tensor the weight 1, and all others 0.

    This is partial gradient matching (FedLeak, Fan et al. 2025, arXiv 2506.08435). The copies of the paper that were used lack
    its rule for the choice of entries. Here the entries of largest magnitude are compared, in which noise is relatively small.
    share: share of the entries of each tensor that is kept, above 0 and at most 1, rounded up to whole entries; entries equal to
    the smallest kept one are kept too. Raises ValueError for a share out of this range.
    """
    if not 0 < share <= 1:
        raise ValueError(
            f"compared_share, the share of gradient entries that are compared, must be above 0 and at most 1, got {share}"
        )

    def weigh(model: nn.Module, observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sizes = {name: g.abs() for name, g in observed.items()}
        minimum = {name: size.flatten().sort().values[-ceil(size.numel() * share)] for name, size in sizes.items()}
        return {name: (size >= minimum[name]).to(size.dtype) for name, size in sizes.items()}

    return weigh


def weigh_by_depth(beta: float, shape: str = "linear", *, relu_modifier: bool = True) -> LayerWeights:
    """Return a function that computes AGIC's layer weights (eqs. 7, 8) from a model and an observed gradient.

    The weights of convolutions run from 1 for the first to beta for the last; a single convolution has the weight 1. Each weight
    is multiplied by 1 / (1 - p), but at most MODIFIER_CAP, where p is the share of zeros in the convolution's observed weight
    gradient. The bias of a convolution and the batch norm behind it have the convolution's weight. Linear layers, and layers
    before the first convolution, have the mean over convolutions, without the factor. Without convolutions all weights are 1.
    shape: how the weight depends on the convolution's number, a name in `DEPTH_SHAPES`; with "constant", beta has no effect.
    relu_modifier: whether to multiply by 1 / (1 - p).
    Raises ValueError for an unknown shape, or a beta that is not positive.
    """
    if shape not in DEPTH_SHAPES:
        raise ValueError(
            f"the argument shape, which says how layer weights depend on depth, must be one of {', '.join(DEPTH_SHAPES)}, got "
            f"{shape!r}"
        )
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")

    def weigh(model: nn.Module, observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        groups = _group_parameters(model)
        count = max((number for number, _ in groups.values()), default=0)
        depth = [_rescale(DEPTH_SHAPES[shape], i, count, beta) for i in range(1, count + 1)]
        weights = {}
        for name, g in observed.items():
            number, convolution = groups.get(name, (0, ""))
            weight = torch.full_like(g.flatten()[0], depth[number - 1] if number else sum(depth) / max(1, count) or 1.0)
            weights[name] = (
                weight * _compute_modifier(observed[convolution]) if relu_modifier and convolution in observed else weight
            )
        return weights

    return weigh


def _rescale(function: Callable[[float], float], i: int, count: int, beta: float) -> float:
    """Return a * function(i) + b, with a and b such that it is 1 at i = 1 and beta at i = count; 1 for a constant function."""
    first, last = function(1), function(count)
    return 1.0 if first == last else 1 + (beta - 1) * (function(i) - first) / (last - first)


def _compute_modifier(gradient: Tensor) -> Tensor:
    zeros = (gradient == 0).to(gradient.dtype).mean()
    return 1 / (1 - zeros).clamp(min=1 / MODIFIER_CAP)


def _group_parameters(model: nn.Module) -> dict[str, tuple[int, str]]:
    """Return a dict from parameter name to the number, from 1, of its convolution and the name of that convolution's weight.

    The convolution of a parameter of another layer, such as batch norm, is the last convolution before it in the model's list of
    modules. Linear layers, and layers before the first convolution, are left out.
    """
    groups: dict[str, tuple[int, str]] = {}
    number, current = 0, ""
    for path, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(prefix=path, recurse=False)]
        if isinstance(module, nn.Conv2d):
            number, current = number + 1, f"{path}.weight" if path else "weight"
        if not isinstance(module, nn.Linear) and number:
            groups |= dict.fromkeys(names, (number, current))
    return groups
