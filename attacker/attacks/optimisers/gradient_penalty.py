"""An optimiser that penalises the norm of the loss's gradient, so that a search prefers flat minima.

FedLeak (Fan et al. 2025, "Boosting gradient leakage attacks", arXiv 2506.08435) adds this norm to the loss of a gradient matching
attack ("gradient regularization") and approximates it. The approximation here is from Zhao et al. 2022, "Penalizing gradient norm
for efficiently improving generalization in deep learning", eqs. 7 and 8, which needs no third derivatives.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.optimisers.first_order import Optimiser, OptimiserState, Stepper


@dataclass(frozen=True, kw_only=True)
class GradientPenalty:
    """The settings of an optimiser of the loss L plus its gradient's norm, `L + weight * r * |dL/dz|`, with a short length r.

    Its gradient is nearly `(1 - weight) * dL/dz(z) + weight * dL/dz(z + r u)`, where u is the unit vector along dL/dz(z). Each
    step therefore needs two evaluations, at z and at z + r u. The best latents of the search may be of either kind.

    inner:    the optimiser that gets this gradient.
    weight:   above 0, at most 1. With 1, the gradient at z + r u alone is used (sharpness-aware minimisation, Foret et al. 2021).
    distance: r divided by the root of the latent's size: the root mean square change of its entries.
    """

    inner: Optimiser
    weight: float
    distance: float

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ValueError(f"the weight of the gradient penalty must be above 0 and at most 1, got {self.weight}")
        if not self.distance > 0:
            raise ValueError(f"the distance of the gradient penalty must be above 0, got {self.distance}")
        if self.inner.period != 1:
            raise ValueError(
                "the gradient penalty needs an optimiser that evaluates the loss once per iteration, such as Adam, got "
                f"{type(self.inner).__name__}"
            )

    @property
    def period(self) -> int:
        return 2

    @property
    def remembers(self) -> int:
        return self.inner.remembers + 2

    def start(self) -> "GradientPenaltyStepper":
        return GradientPenaltyStepper(self, self.inner.start())


@dataclass
class GradientPenaltyStepper:
    """A running optimisation, whose evaluations are alternately at the latents z and at z + r u, see `GradientPenalty`.

    from_: the latents z (P, D) if the next evaluation is at z + r u. slope, height: gradients (P, D) and losses (P,) at z. All
    three are None if the next evaluation is at z.
    """

    settings: GradientPenalty
    inner: Stepper
    from_: Tensor | None = None
    slope: Tensor | None = None
    height: Tensor | None = None

    def step(self, z: Tensor, gradient: Tensor, loss: Tensor, progress: float) -> Tensor:
        settings, slope, height = self.settings, self.slope, self.height
        if self.from_ is None or slope is None or height is None:
            self.from_, self.slope, self.height = z, gradient, loss
            length: float = settings.distance * z.shape[1] ** 0.5
            up: Tensor = torch.nn.functional.normalize(gradient, dim=1, eps=torch.finfo(z.dtype).tiny)
            return z + length * up
        penalised = (1 - settings.weight) * slope + settings.weight * gradient
        moved = self.inner.step(self.from_, penalised, height, progress)
        self.from_ = self.slope = self.height = None
        return moved

    def keep(self, rows: Tensor) -> None:
        if self.from_ is not None and self.slope is not None and self.height is not None:
            self.from_, self.slope, self.height = self.from_[rows], self.slope[rows], self.height[rows]
        self.inner.keep(rows)

    def get_state(self) -> OptimiserState:
        own = {} if self.from_ is None or self.slope is None or self.height is None else {
            "from": self.from_, "slope": self.slope, "height": self.height,
        }  # fmt: skip
        return {**own, **{f"inner.{name}": t for name, t in self.inner.get_state().items()}}

    def load(self, state: OptimiserState) -> None:
        self.from_, self.slope, self.height = state.get("from"), state.get("slope"), state.get("height")
        self.inner.load({name.removeprefix("inner."): t for name, t in state.items() if name.startswith("inner.")})
