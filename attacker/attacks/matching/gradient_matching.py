"""The gradient matching attack: a search for examples whose simulated gradient equals the observed one.

    for _ in range(steps):
        x, y = decode(z)
        loss = objective(channel(gradient(model, weights, x, y)), observed) + prior(x)
        z = project(optimiser(z, loss))

Each row of z is one problem, that is one restart of one case; all rows are optimised at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Generator

from attacker.attacks.base import Case, Effort, Memory, Progress
from attacker.attacks.matching.parts import MatchingParts
from attacker.attacks.matching.run import MatchingRun
from attacker.attacks.nulls import blinded
from attacker.reconstruction import Reconstruction


@dataclass(kw_only=True)
class GradientMatching(MatchingParts):
    """A gradient matching attack, composed of the parts of `MatchingParts`."""

    @property
    def effort(self) -> Effort:
        search = self.search
        return Effort(evaluations=search.steps * search.optimiser.period, vectors=search.optimiser.remembers)

    def null(self) -> "GradientMatching":
        return replace(self, sees_gradient=False)

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Attack `cases`, which must agree in model, data, training settings, defense and number of examples."""
        return MatchingRun(self, cases if self.sees_gradient else blinded(cases), rng, progress, memory).run()
