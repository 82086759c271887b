"""The gradient matching attack: a search for examples whose simulated gradient equals the observed one.

    for _ in range(steps):
        x, y = decode(z)
        loss = objective(channel(gradient(model, weights, x, y)), observed) + prior(x)
        z = project(optimiser(z, loss))

Each row of z is the latent vector of one case; all rows are optimised at once. Cases whose search was stuck are then searched
again from other starts. A case has at most `Search.restarts` starts; its first search counts as one of them, so that with 1 no
search is repeated, and only a warm start does not count. With `Search.consistency`, all these starts of a case are searched
at once, one row each, and each row is also attracted by the mean over the case's starts. `channel` applies the defense that the
attacker knows, such as clipping or compression, to the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Generator, Tensor

from attacker.attacks.base import Effort, Memory, Progress
from attacker.attacks.cases import Case
from attacker.attacks.labels.step_labels import InferredOrder
from attacker.attacks.matching.matching_run import MatchingRun
from attacker.attacks.matching.polishing import polish
from attacker.attacks.matching.settings import MatchingSettings
from attacker.attacks.nulls import blind_cases
from attacker.attacks.optimisers.lbfgs import LBFGS
from attacker.attacks.simulation.step_orders import StepOrder
from attacker.attacks.timing import time_call
from attacker.reconstruction import Reconstruction


@dataclass(kw_only=True)
class GradientMatching(MatchingSettings):
    """A gradient matching attack, composed of the parts of `MatchingSettings`."""

    @property
    def effort(self) -> Effort:
        search = self.search
        evaluations = search.steps * search.optimiser.period * search.at_once
        starts = search.restarts // search.at_once + (self.warm_start is not None) if self.sees_gradient else 1
        polished = (
            self.polish is not None
            and self.sees_gradient
            and self.polish.count_iterations(search.steps * search.optimiser.period) > 0
        )
        vectors = max(search.optimiser.remembers, LBFGS().remembers * polished)
        return Effort(
            evaluations=evaluations,
            vectors=vectors,
            searches=search.at_once,
            starts=starts,
            local_steps=self.simulation.local_steps,
        )

    def null(self) -> "GradientMatching":
        return replace(self, sees_gradient=False)

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Return a reconstruction of each of `cases`, which must agree in model, data, training, defense and number of examples.

        rng, progress, memory: source of the seed, status callback and checkpoint storage, as in `Attack.__call__`.
        """
        run = MatchingRun(self, cases if self.sees_gradient else blind_cases(cases), rng, progress, memory)
        run.search()
        polish(run)
        return run.build_answers()

    def time_evaluation(self, case: Case) -> float:
        """Return the seconds of one evaluation of the loss and its gradient, at the start of a search, see `Measurable`.

        They are divided by the number of local steps that "auto" simulates, since there are as many times fewer evaluations.
        A search that is compiled is measured without compilation, and a warm start and the inference of labels are left out.
        """
        alone = replace(self, warm_start=None, search=replace(self.search, compiled=False))
        run = TimedRun(alone, [case] if self.sees_gradient else blind_cases([case]), Generator().manual_seed(0), None)
        return run.time_evaluation() / run.steps_each


class TimedRun(MatchingRun):
    """A run of which only the time of one evaluation is measured. It has arbitrary labels and orders, which are not inferred."""

    def time_evaluation(self) -> float:
        """Return the seconds of one evaluation of the loss and its gradient for all cases, at the start of their searches."""
        pending = [i for i in range(len(self.cases)) for _ in range(self.attack.search.at_once)]
        z, _, problems = self._build_problems(self.parts[0].batch, pending, 0)
        return time_call(lambda: problems.evaluate(z, dict(problems.per_problem), 0.0), self.attack.device)

    def _infer_orders(self) -> Sequence[InferredOrder | None]:
        used = tuple(k % self.batch.count for k in range(sum(self.batch.views[0].sizes)))
        return [InferredOrder(StepOrder(used, (0,) * self.batch.count), 0.0, inf) for _ in self.cases]

    def _find_labels(self, pending: list[int], restart: int) -> Tensor:
        return torch.zeros(len(pending), self.batch.count, dtype=torch.long, device=self.attack.device)
