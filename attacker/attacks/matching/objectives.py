"""How far a simulated gradient is from the observed one. Both are dL/dw by parameter name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.gradients.products import products

Gradient = Mapping[str, Tensor]
Products = Callable[[Gradient, Gradient], tuple[Tensor, Tensor, Tensor]]
"""From the simulated and the observed gradient, their inner product, and those of each with itself."""


@dataclass(frozen=True)
class Objective:
    """A distance between gradients, and what it means.

    distance: from the simulated and the observed gradient, a 0-d tensor.
    worst:    from the observed gradient, what a simulated gradient that says nothing would cost.
    squares:  whether it is in squared units of the gradient, so that the power of noise can be told from it.
    of_large: the distance again, where it is faster for large tensors; not to be called under `vmap` or `torch.func.grad`.
    """

    distance: Callable[[Gradient, Gradient], Tensor]
    worst: Callable[[Gradient], Tensor]
    squares: bool
    of_large: Callable[[Gradient, Gradient], Tensor] | None = None


def _products(simulated: Gradient, observed: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    dot = torch.stack([(simulated[name] * observed[name]).sum() for name in observed]).sum()
    return dot, squared_norm({name: simulated[name] for name in observed}), squared_norm(observed)


def squared_distance(simulated: Gradient, observed: Gradient) -> Tensor:
    """Sum of squared differences over all coordinates (DLG, eq. 3; CPL, algorithm 1 line 12)."""
    return torch.stack([(simulated[name] - observed[name]).square().sum() for name in observed]).sum()


def cosine_distance(simulated: Gradient, observed: Gradient, products: Products = _products) -> Tensor:
    """One minus the cosine between both gradients, each as one vector (Geiping et al. 2020, eq. 4)."""
    dot, *squares = products(simulated, observed)
    return 1 - dot / (squares[0] * squares[1]).sqrt().clamp(min=torch.finfo(dot.dtype).tiny)


def absolute_distance(simulated: Gradient, observed: Gradient) -> Tensor:
    """Sum of absolute differences over all coordinates: a few that are far off count for less than in the squared one."""
    return torch.stack([(simulated[name] - observed[name]).abs().sum() for name in observed]).sum()


def squared_norm(gradient: Gradient) -> Tensor:
    """Sum of squares over all coordinates."""
    return torch.stack([g.square().sum() for g in gradient.values()]).sum()


euclidean = Objective(squared_distance, worst=squared_norm, squares=True)
cosine = Objective(
    cosine_distance,
    worst=lambda observed: torch.ones_like(squared_norm(observed)),
    squares=False,
    of_large=lambda simulated, observed: cosine_distance(simulated, observed, products),
)
absolute = Objective(
    absolute_distance, worst=lambda observed: torch.stack([g.abs().sum() for g in observed.values()]).sum(), squares=False
)
