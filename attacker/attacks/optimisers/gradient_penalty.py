"""An optimiser that penalises the norm of the loss's gradient, so that a search prefers flat minima.

FedLeak (Fan et al. 2025, "Boosting gradient leakage attacks", arXiv 2506.08435) adds this norm to the loss of a gradient matching
attack ("gradient regularization") and approximates it. The approximation here is from Zhao et al. 2022, "Penalizing gradient norm
for efficiently improving generalization in deep learning", eqs. 7 and 8, which needs no third derivatives.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.optimisers.first_order import Optimiser, OptimiserState, RowState, Stepper, add_prefix, remove_prefix


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


class GradientPenaltyStepper(RowState):
    """A running optimisation, whose evaluations are alternately at the latents z and at z + r u, see `GradientPenalty`.

    rows: if the next evaluation is at z + r u: the latents z (P, D) as "from", their gradients (P, D) as "slope", and their
    losses (P,) as "height". Empty if it is at z.
    """

    def __init__(self, settings: GradientPenalty, inner: Stepper) -> None:
        super().__init__()
        self.settings, self.inner = settings, inner

    def step(self, z: Tensor, gradient: Tensor, loss: Tensor, progress: float) -> Tensor:
        settings, rows = self.settings, self.rows
        if not rows:
            self.rows = {"from": z, "slope": gradient, "height": loss}
            length: float = settings.distance * z.shape[1] ** 0.5
            up: Tensor = torch.nn.functional.normalize(gradient, dim=1, eps=torch.finfo(z.dtype).tiny)
            return z + length * up
        self.rows = {}
        penalised = (1 - settings.weight) * rows["slope"] + settings.weight * gradient
        return self.inner.step(rows["from"], penalised, rows["height"], progress)

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.inner.keep(rows)

    def get_state(self) -> OptimiserState:
        return {**self.rows, **add_prefix("inner", self.inner.get_state())}

    def load(self, state: OptimiserState) -> None:
        super().load({name: t for name, t in state.items() if not name.startswith("inner.")})
        self.inner.load(remove_prefix("inner", state))
