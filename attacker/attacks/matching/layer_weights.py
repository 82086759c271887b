"""How much each layer's gradient counts in the comparison (AGIC, section IV-C)."""

from collections.abc import Callable, Mapping
from math import exp, log

import torch
from torch import Tensor, nn

LayerWeights = Callable[[nn.Module, Mapping[str, Tensor]], dict[str, Tensor]]
"""From the model and the observed gradient, a 0-d weight for each of its tensors."""

MODIFIER_CAP = 1e3
"""At most so much does a layer's share of zeros count: a layer that is all zeros would count for ever."""

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda i: 0.0,
    "linear": lambda i: i,
    "log": log,
    "exp": exp,
}
"""Functions of the convolution's number i = 1, 2, ...; AGIC's table I has them rising and falling."""


def equal(model: nn.Module, observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors count alike."""
    return {name: torch.ones_like(g.flatten()[0]) for name, g in observed.items()}


def by_depth(beta: float, shape: str = "linear", *, relu_modifier: bool = True) -> LayerWeights:
    """AGIC's layer weights: a function of the convolution's number through (1, 1), (last, beta), times 1 / (1 - p) (eqs. 7, 8).

    p is the share of zeros in the convolution's observed weight gradient. Other tensors than a convolution's weights (its bias,
    the batch norm behind it) count as it does; fully connected layers by the mean over convolutions, without the modifier.
    Without convolutions all tensors count alike. Raises ValueError for an unknown shape, or a beta that is not positive.
    """
    if shape not in SHAPES:
        raise ValueError(f"unknown shape of layer weights {shape!r}. Known: {', '.join(SHAPES)}")
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")

    def weigh(model: nn.Module, observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        groups = _groups(model)
        count = max((number for number, _ in groups.values()), default=0)
        depth = [_through(SHAPES[shape], i, count, beta) for i in range(1, count + 1)]
        found = {}
        for name, g in observed.items():
            number, convolution = groups.get(name, (0, ""))
            weight = torch.full_like(g.flatten()[0], depth[number - 1] if number else sum(depth) / max(1, count) or 1.0)
            found[name] = weight * _modifier(observed[convolution]) if relu_modifier and convolution in observed else weight
        return found

    return weigh


def _through(function: Callable[[float], float], i: int, count: int, beta: float) -> float:
    """The value at i of a * function + b through (1, 1) and (count, beta)."""
    first, last = function(1), function(count)
    return 1.0 if first == last else 1 + (beta - 1) * (function(i) - first) / (last - first)


def _modifier(gradient: Tensor) -> Tensor:
    zeros = (gradient == 0).to(gradient.dtype).mean()
    return 1 / (1 - zeros).clamp(min=1 / MODIFIER_CAP)


def _groups(model: nn.Module) -> dict[str, tuple[int, str]]:
    """By parameter name, the number of the convolution it belongs to, and that one's weights; not of linear layers."""
    groups: dict[str, tuple[int, str]] = {}
    number, current = 0, ""
    for path, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(prefix=path, recurse=False)]
        if isinstance(module, nn.Conv2d):
            number, current = number + 1, f"{path}.weight" if path else "weight"
        if not isinstance(module, nn.Linear) and number:
            groups |= dict.fromkeys(own, (number, current))
    return groups
