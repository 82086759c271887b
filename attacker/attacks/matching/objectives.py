"""Distances between a simulated and an observed gradient, and the objective composed of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attacker.attacks.gradients.products import GradientTensors, compute_products
from attacker.attacks.linking import Links
from attacker.attacks.matching.layer_weights import LayerWeights
from attacker.attacks.simulation.gradients import squared_norm

FeatureLayerName = Literal["head", "gaussian"]
TensorUnit = Literal["root_mean_square", "norm"]
Products = Callable[[GradientTensors, GradientTensors], tuple[Tensor, Tensor, Tensor]]
"""Maps the simulated and the observed gradient to <simulated, observed>, <simulated, simulated> and <observed, observed>."""


@dataclass(frozen=True)
class Distance:
    """A distance between gradients, with its properties.

    between:  maps the simulated and the observed gradient to their distance, a 0-d tensor.
    worst:    maps the observed gradient to its distance from a zero gradient, 0-d.
    squares:  whether the distance has squared units of the gradient, so that it can be compared with the power of noise.
    of_large: an equal function that is faster for large tensors, but cannot be called under `vmap` or `torch.func.grad`; None if
              there is none.
    bounded:  whether `worst` is 1 for every gradient.
    """

    between: Callable[[GradientTensors, GradientTensors], Tensor]
    worst: Callable[[GradientTensors], Tensor]
    squares: bool
    of_large: Callable[[GradientTensors, GradientTensors], Tensor] | None = None
    bounded: bool = False

    def __call__(self, simulated: GradientTensors, observed: GradientTensors) -> Tensor:
        return self.between(simulated, observed)


def _compute_products(simulated: GradientTensors, observed: GradientTensors) -> tuple[Tensor, Tensor, Tensor]:
    dot = torch.stack([(simulated[name] * observed[name]).sum() for name in observed]).sum()
    return dot, squared_norm({name: simulated[name] for name in observed}), squared_norm(observed)


def squared_distance(simulated: GradientTensors, observed: GradientTensors) -> Tensor:
    """Return the sum of squared differences over all entries of the parameters in `observed` (DLG, eq. 3)."""
    return torch.stack([(simulated[name] - observed[name]).square().sum() for name in observed]).sum()


def cosine_distance(simulated: GradientTensors, observed: GradientTensors, products: Products = _compute_products) -> Tensor:
    """Return one minus the cosine between both gradients, each as one vector (Geiping et al. 2020, eq. 4).

    It is 1 if one of them is zero. products: computes the three scalar products of the gradients that the cosine needs, see
    `Products`.
    """
    dot, *squares = products(simulated, observed)
    return 1 - dot / (squares[0] * squares[1]).sqrt().clamp(min=torch.finfo(dot.dtype).tiny)


def absolute_distance(simulated: GradientTensors, observed: GradientTensors) -> Tensor:
    """Return the sum of absolute differences of the parameters in `observed`, which outliers affect less than squares."""
    return torch.stack([(simulated[name] - observed[name]).abs().sum() for name in observed]).sum()


euclidean = Distance(squared_distance, worst=squared_norm, squares=True)
cosine = Distance(
    cosine_distance,
    worst=lambda observed: torch.ones_like(squared_norm(observed)),
    squares=False,
    of_large=lambda simulated, observed: cosine_distance(simulated, observed, compute_products),
    bounded=True,
)
absolute = Distance(
    absolute_distance, worst=lambda observed: torch.stack([g.abs().sum() for g in observed.values()]).sum(), squares=False
)


@dataclass(frozen=True, kw_only=True)
class FeatureTerm:
    """A term of the loss that compares features.

    weight: relative to the distance of the first observed gradient from a zero gradient. layer: the layer whose inputs the
    features are: "head" (the last linear layer) or "gaussian" (a wide layer with random Gaussian weights before it).
    injected: whether decoders that take features get the recovered features (`Decoder.inject`).
    """

    weight: float
    layer: FeatureLayerName = "head"
    injected: bool = False


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective of a search without priors: the sum over observations o of `get_weight(o) * apply_robust_loss(distance(o))`.

    distance: between simulated and observed gradient. layers: weights of the layers, or of entries, in this distance; None for
              equal weights.
    unit:     what each tensor is divided by before it is compared; None for nothing. The unit is the tensor's root mean square,
              since rounding errors are proportional to a tensor's values, or the tensor's norm, so that all tensors have equal
              parts of a cosine (Liu et al. 2024). The unit has no effect if the gradient has noise of known variance, which is
              the same in all tensors.
    robust:   if above 0, a distance d is replaced by `robust * log(1 + d / robust)` (Cauchy's loss), so that observations that
              fit badly, for example because of wrong links, have less influence. 0 leaves distances unchanged.
    later:    weight of observations after a client's first epoch; observations in the first epoch have weight 1, and all have
              weight 1 if epochs are unknown.
    batch_norm: weight of the term that compares statistics of batch norm with those that clients returned (`batch_statistics`),
              relative to the mean over observations of the distance of the observed gradient from a zero gradient; 0 leaves it
              out. It has no effect unless clients return buffers.
    features: the term that compares the features of the first observation's examples with those that the gradient determines
              (`feature_matching`); None leaves it out.
    """

    distance: Distance = euclidean
    layers: LayerWeights | None = None
    unit: TensorUnit | None = None
    robust: float = 0.0
    later: float = 0.1
    batch_norm: float = 0.0
    features: FeatureTerm | None = None

    def apply_robust_loss(self, distance: Tensor) -> Tensor:
        """Return Cauchy's loss `robust * log(1 + distance / robust)`, or the distance itself if `robust` is 0."""
        return self.robust * torch.log1p(distance / self.robust) if self.robust else distance

    def get_weight(self, links: Links, o: int) -> float:
        """Return the o-th observation's weight: `later` after the first known epoch, else 1 (AGIC, section V-A)."""
        return self.later if links.epochs and links.epochs[o] > min(links.epochs) else 1.0
