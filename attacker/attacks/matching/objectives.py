"""Distances between a simulated and an observed gradient, and the objective that is made of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.gradients.products import Gradient, products, squared_norm
from attacker.attacks.linking import Links
from attacker.attacks.matching.layer_weights import LayerWeights

Products = Callable[[Gradient, Gradient], tuple[Tensor, Tensor, Tensor]]
"""From the simulated and the observed gradient, their inner product, and those of each with itself."""


@dataclass(frozen=True)
class Distance:
    """A distance between gradients, and what it means.

    between:  from the simulated and the observed gradient, a 0-d tensor.
    worst:    from the observed gradient, its distance to a zero gradient.
    squares:  whether it is in squared units of the gradient, so that the power of noise can be told from it.
    of_large: the distance again, where it is faster for large tensors; not to be called under `vmap` or `torch.func.grad`.
    bounded:  whether `worst` is 1 for every gradient, so that it is known before any is seen.
    """

    between: Callable[[Gradient, Gradient], Tensor]
    worst: Callable[[Gradient], Tensor]
    squares: bool
    of_large: Callable[[Gradient, Gradient], Tensor] | None = None
    bounded: bool = False

    def __call__(self, simulated: Gradient, observed: Gradient) -> Tensor:
        return self.between(simulated, observed)


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


euclidean = Distance(squared_distance, worst=squared_norm, squares=True)
cosine = Distance(
    cosine_distance,
    worst=lambda observed: torch.ones_like(squared_norm(observed)),
    squares=False,
    of_large=lambda simulated, observed: cosine_distance(simulated, observed, products),
    bounded=True,
)
absolute = Distance(
    absolute_distance, worst=lambda observed: torch.stack([g.abs().sum() for g in observed.values()]).sum(), squares=False
)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a search minimises, beside its priors: the sum over observations o of `weight(o) * robust_loss(distance(o))`.

    layers: how much each layer counts in the distance; None: all alike.
    robust: above 0, a distance d counts as `robust * log(1 + d / robust)`: observations that fit badly, behind wrong links or of
            bad rounds, have less of a say.
    later:  weight of observations after a client's first epoch; that of the others is 1.
    """

    distance: Distance = euclidean
    layers: LayerWeights | None = None
    robust: float = 0.0
    later: float = 0.1

    def robust_loss(self, distance: Tensor) -> Tensor:
        """Return what a distance counts as (Cauchy's loss)."""
        return self.robust * torch.log1p(distance / self.robust) if self.robust else distance

    def weight(self, links: Links, o: int) -> float:
        """Return the weight of the o-th observation: early rounds leak most (AGIC, section V-A)."""
        return self.later if links.epochs and links.epochs[o] > min(links.epochs) else 1.0
