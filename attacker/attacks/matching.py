"""Gradient matching: search for examples whose simulated gradient is the observed one.

    for _ in range(steps):
        x, y = decode(z)
        loss = objective(channel(gradient(model, weights, x, y)), observed) + prior(x)
        z = optimiser(z, loss)

with one row of z a problem, that is one restart of one case, and all rows at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Generator, Tensor

from attacker.attacks.base import Case, Need, Progress
from attacker.attacks.descent import Stop
from attacker.attacks.initialisation import Init
from attacker.attacks.labels import LabelRule
from attacker.attacks.objectives import Objective
from attacker.attacks.optimisers import Optimiser
from attacker.attacks.priors import Prior, flat
from attacker.attacks.search import Search
from attacker.reconstruction import Reconstruction


@dataclass(frozen=True, kw_only=True)
class GradientMatching:
    """An attack put together from its parts. Steps of the search are steps in pixels, whatever the normalisation.

    objective: distance between gradients. prior: belief about x. init: where the search starts.
    labels:    how labels are read off the gradient; None: they are searched for with the images, as soft labels (DLG).
    optimiser, steps, stop: steps are counted in the optimiser's periods.
    restarts:  at most so many starts a case: another one only where the last is stuck; the lowest own loss is kept.
    boxed:     keep x in [0, 1] after every step.
    agreement: weight of the squared distance between predicted probabilities and labels (CPL's alpha).
    knows_defense: compute gradients by the clients' own rule, pass the simulated update through the channel of the defense, leave
                   out what misleads, and start again only where more than the noise is left unexplained.
    first:     from the cases, where the first start of each is known better than by `init`; None for those where it is not.
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
    knows_defense: bool = True
    sees_gradient: bool = True
    first: Callable[[Sequence[Case]], Sequence[Tensor | None]] | None = None
    oracles: tuple[str, ...] = ()
    needs: frozenset[Need] = field(default=frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES}))
    device: str = "cpu"

    def __call__(self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None) -> list[Reconstruction]:
        """Attack `cases`, which agree in model, data, training, defense and number of examples."""
        return Search(self, cases, rng, progress).run()
