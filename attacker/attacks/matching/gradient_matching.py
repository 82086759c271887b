"""Gradient matching: search for examples whose simulated gradient is the observed one.

    for _ in range(steps):
        x, y = decode(z)
        loss = objective(channel(gradient(model, weights, x, y)), observed) + prior(x)
        z = optimiser(z, loss)

with one row of z a problem, that is one restart of one case, and all rows at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Generator, Tensor

from attacker.attacks.base import Case, Effort, Memory, Need, Progress
from attacker.attacks.labels.rules import LabelRule
from attacker.attacks.matching.initialisation import Init
from attacker.attacks.matching.layer_weights import LayerWeights
from attacker.attacks.matching.objectives import Objective
from attacker.attacks.matching.priors import Prior, flat
from attacker.attacks.matching.search import Search
from attacker.attacks.matching.warm_starts import First
from attacker.attacks.nulls import blinded
from attacker.attacks.optimisers.descent import Stop
from attacker.attacks.optimisers.first_order import Optimiser
from attacker.reconstruction import Reconstruction

LocalSteps = Literal["one_batch", "simulated"]


@dataclass(kw_only=True)
class GradientMatching:
    """An attack put together from its parts. Steps of the search are steps in pixels, whatever the normalisation.

    objective: distance between gradients. prior: belief about x. init: where the search starts.
    labels:    how labels are read off the gradient; None: they are searched for with the images, as soft labels (DLG).
    optimiser, steps, stop: steps are counted in the optimiser's periods.
    restarts:  at most so many starts a case: another one only where the last is stuck; the lowest own loss is kept.
    boxed:     keep x in [0, 1] after every step.
    agreement: weight of the squared distance between predicted probabilities and labels (CPL's alpha), or between logits and
               those of the true examples where an oracle tells them.
    layers:    how much each layer counts; None: all alike.
    local_steps: one_batch takes all steps of a client as one on all its examples (AGIC); simulated goes through them one by one.
    surrogate: the one batch is taken at weights between those sent and those sent back; how far is searched for (SME).
    order_invariant: above 0, examples of each simulated local epoch are their own, drawn together by a prior of this weight.
    later:     weight of observations after a client's first epoch. robust: above 0, the distance d of an observation counts as
               `robust * log(1 + d / robust)`: those that fit badly, behind wrong links or of bad rounds, have less of a say.
    coarse:    share of the steps, from the first on, whose convolutions are computed in bfloat16, where the device has it and all
               problems share weights; the rest is in float32, and what is kept is the best of that.
    compiled:  have PyTorch compile the comparison, which pays for small networks and long searches; see `compiled`.
    smooth:    of images, weight of the total variation of pixels in [0, 1], as a share of what a guess that says nothing costs.
    denoised:  where noise of known power is in the gradients, and distances are squared, prefer smooth images by as much as the
               noise leaves open; see `belief_behind_noise`.
    knows_defense: compute gradients by the clients' own rule, pass the simulated update through the channel of the defense, leave
                   out what misleads, and start again only where more than the noise is left unexplained.
    first:     from the cases, a closed form's inexact answer for each, or None: a start before those of `init`, which makes up
               for missing examples. Unless a search from there converges, the first of those is tried as well: noise can spoil an
               answer.
    sees_gradient: False gives the null: the same search by the prior alone, with random labels.
    """

    name: str
    objective: Objective
    labels: LabelRule | None
    init: Init
    optimiser: Optimiser
    steps: int
    stop: Stop
    prior: Prior = flat
    restarts: int = 1
    boxed: bool = False
    agreement: float = 0.0
    layers: LayerWeights | None = None
    local_steps: LocalSteps = "one_batch"
    surrogate: bool = False
    order_invariant: float = 0.0
    later: float = 0.1
    robust: float = 0.0
    coarse: float = 0.0
    compiled: bool = False
    smooth: float = 0.0
    denoised: bool = False
    knows_defense: bool = True
    sees_gradient: bool = True
    first: First | None = None
    needs: frozenset[Need] = field(default=frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES}))
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.order_invariant and self.local_steps != "simulated":
            raise ValueError("order_invariant ties the local epochs of a simulation: set local_steps to simulated")
        if self.surrogate and self.local_steps == "simulated":
            raise ValueError("surrogate weights stand for the local steps: set local_steps to one_batch")
        if self.restarts < 1:
            raise ValueError(f"restarts counts the starts of a search, of which one is the least, got {self.restarts}")
        if self.first is not None and self.order_invariant:
            raise ValueError("a given start holds each example once, and order_invariant searches for one in each local epoch")
        if not 0 <= self.coarse < 1:
            raise ValueError(f"coarse is a share of the steps in [0, 1): the last ones are in float32, got {self.coarse}")

    @property
    def effort(self) -> Effort:
        return Effort(evaluations=self.steps * self.optimiser.period, vectors=self.optimiser.remembers)

    def null(self) -> "GradientMatching":
        return replace(self, sees_gradient=False)

    def robust_loss(self, distance: Tensor) -> Tensor:
        """What a distance counts as (Cauchy's loss)."""
        return self.robust * torch.log1p(distance / self.robust) if self.robust else distance

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Attack `cases`, which agree in model, data, training, defense and number of examples."""
        return Search(self, cases if self.sees_gradient else blinded(cases), rng, progress, memory).run()
