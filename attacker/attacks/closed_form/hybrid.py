"""H-GAP: an attack that runs a closed form and a search, and keeps the answer that a criterion prefers (R-GAP, section 5).

The paper's criterion, "roughness", which `hgap` uses by default, prefers the answer that differs less from its 3x3 mean filter;
see `get_criterion` for others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Generator, Tensor
from torch.nn import functional

from attacker.attacks.base import Effort, Memory, Progress, estimate_effort
from attacker.attacks.cases import Case
from attacker.attacks.closed_form.attack import ClosedForm
from attacker.attacks.closed_form.observations import StackedObservations, observe
from attacker.attacks.confidence.evidence import measure_outside
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.needs import Need
from attacker.reconstruction import Reconstruction


def measure_roughness(x: Tensor) -> Tensor:
    """Return the mean squared difference between each image (N, C, H, W) and its 3x3 mean filter; it is large for noise.

    At borders, the mean is over the pixels inside. The attack `hgap` uses it by default to choose between the answers of a closed
    form and of a search (Zhu and Blaschko 2021, R-GAP, section 5).
    """
    return (x - functional.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)).flatten(1).square().mean(dim=1)


def total_variation(x: Tensor) -> Tensor:
    """Return, for each image (N, C, H, W), the mean absolute difference of vertical plus that of horizontal neighbours."""
    down, across = x.diff(dim=-2), x.diff(dim=-1)
    return down.abs().flatten(1).mean(dim=1) + across.abs().flatten(1).mean(dim=1)


CRITERIA: dict[str, Callable[[Tensor], Tensor]] = {
    "roughness": measure_roughness,
    "total_variation": total_variation,
    "outside": measure_outside,
}
"""Criteria for how implausible reconstructions x (N, *shape) are, (N,), without a reference: lower is better."""

Judge = Callable[[Reconstruction, int, StackedObservations], float]
"""Maps (answer, index of its case, stacked observations) to a score; lower is better."""


def get_criterion(name: str) -> Judge:
    """Return the function that scores answers by a criterion of `CRITERIA`, or by "gradient"; a lower score is better.

    "gradient" is the relative distance between the answer's gradient and the observed one. Raises ValueError for other names.
    """
    if name == "gradient":
        return lambda answer, i, observed: observed.measure_misfit(i, answer.x.to(observed.device), answer.y.to(observed.device))
    if name not in CRITERIA:
        raise ValueError(f"unknown criterion {name!r}. Known: {', '.join([*CRITERIA, 'gradient'])}")
    return lambda answer, i, observed: float(CRITERIA[name](answer.x).mean().nan_to_num(nan=float("inf")))


@dataclass(kw_only=True)
class Hybrid:
    """An attack that runs a closed form and a search on every case, and keeps the better answer of each.

    criterion: how answers are compared, a name that `get_criterion` accepts. knows_defense: whether the criterion "gradient"
               models the defense; `closed` and `search` have settings of their own.
    sees_gradient: False gives the null (the attack without the client's update), for which the null of `search` is used.
    """

    name: str
    closed: ClosedForm
    search: GradientMatching
    criterion: str
    knows_defense: bool = True
    sees_gradient: bool = True
    needs: frozenset[Need] = field(default=frozenset())
    device: str = "cpu"

    @property
    def effort(self) -> Effort:
        return estimate_effort(self.search if self.sees_gradient else self.search.null())

    def null(self) -> "Hybrid":
        return replace(self, sees_gradient=False)

    def time_evaluation(self, case: Case) -> float:
        """Return the seconds of one evaluation of the search, see `Measurable`."""
        return replace(self.search, sees_gradient=self.sees_gradient, device=self.device).time_evaluation(case)

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Return for each of `cases` the better answer of the closed form and the search, with a note on the choice.

        The cases agree in model, data, training and defense, and have one example each. If `sees_gradient` is False, only the
        null of `search` runs, and its reconstructions are returned.
        """
        attacks = [replace(attack, device=self.device, sees_gradient=self.sees_gradient) for attack in (self.closed, self.search)]
        if not self.sees_gradient:
            return [replace(result, attack=self.name) for result in attacks[1](cases, rng=rng, progress=progress, memory=memory)]
        memories = (None, memory)  # only the search is long enough to need checkpoints
        answers = (
            attack(cases, rng=rng, progress=progress, memory=own_memory)
            for attack, own_memory in zip(attacks, memories, strict=True)
        )
        pairs = zip(*answers, strict=True)
        observed, criterion = observe(cases, knows_defense=self.knows_defense, device=self.device), get_criterion(self.criterion)
        return [self._choose_better(pair, [criterion(answer, i, observed) for answer in pair]) for i, pair in enumerate(pairs)]

    def _choose_better(self, pair: Sequence[Reconstruction], badness: Sequence[float]) -> Reconstruction:
        better = min(range(2), key=badness.__getitem__)
        chosen, other = pair[better], pair[1 - better]
        note = (
            f"the answer of {chosen.route} is kept, because its score by the criterion {self.criterion} is lower: "
            f"{badness[better]:.3g}, and {badness[1 - better]:.3g} for {other.route}"
        )
        return replace(
            chosen,
            attack=self.name,
            iterations=sum(answer.iterations for answer in pair),
            evaluations=sum(answer.evaluations for answer in pair),
            seconds=sum(answer.seconds for answer in pair),
            interrupted=any(answer.interrupted for answer in pair),
            notes=(*chosen.notes, note),
        )
