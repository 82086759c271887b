"""The settings of a gradient matching attack: settings of its labels, settings of its search, and all parts together."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from attacker.attacks.labels.rules import LabelRule, infer_labels
from attacker.attacks.learned.enhancer import Enhancer
from attacker.attacks.matching.objectives import Objective, euclidean
from attacker.attacks.matching.parametrisation import Parametrisation
from attacker.attacks.matching.priors import Consistency, Prior
from attacker.attacks.matching.simulation import Simulation
from attacker.attacks.matching.warm_starts import HeldExamples, WarmStartRule
from attacker.attacks.needs import Need
from attacker.attacks.optimisers.first_order import Optimiser
from attacker.attacks.optimisers.lbfgs import LBFGS
from attacker.attacks.optimisers.stopping import PLATEAU_STOP, Stop


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The treatment of labels.

    rule:      function that infers labels from the gradient before the search, unless they are known. If it is None and labels
               are not known, soft labels are optimised together with the examples (DLG).
    agreement: weight in the loss of the squared distance between the probabilities predicted for the candidate examples and their
               labels (CPL's alpha). If the logits of the true examples, which no server knows, are given to the attack, the
               weight is of the squared distance between these logits and the logits of the candidates.
    """

    rule: LabelRule | None = infer_labels
    agreement: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Search:
    """The settings of the minimisation.

    optimiser: changes latent vectors; for the decoder `pixels` these are pixels on the scale [0, 1], before normalisation.
    steps:     maximum number of iterations. An iteration may consist of several gradient evaluations, see `Optimiser.period`.
               With `Simulation.local_steps` "auto", iterations that simulate n local steps take about n times as long, and there
               are n times fewer.
    stop:      when a search stops earlier.
    restarts:  maximum number of starts per case, besides a warm start. A case is started again only if its lowest loss so far
               is above a threshold (`Stop.stuck`); for the first start after a warm start, see `WarmStart.alone`. The result with
               the lowest loss is kept.
    coarse:    share of the steps, at the beginning, whose large convolutions are computed in bfloat16 if the device computes
               bfloat16 faster and the examples of all cases are computed in one batch (`View.at_once`). Results of these steps
               are dropped if the search goes on after them.
    compiled:  whether to compile the loss by `torch.compile`, which is worthwhile for small networks and long searches. It has no
               effect in steps that are coarse, for rounds in order (`Simulation.in_order`), and while more searches run than
               there are cases, as with `consistency`.
    consistency: term that makes the candidates of all starts similar. With it all `restarts` starts of a case are made, at once,
               with the same labels. It changes the gradient that the optimiser gets, but not the loss by which the best iterate
               and the best start are chosen. L-BFGS, whose steps depend on the loss, is refused. None for separate starts.
    """

    optimiser: Optimiser = field(default_factory=LBFGS)
    steps: int = 300
    stop: Stop = PLATEAU_STOP
    restarts: int = 1
    coarse: float = 0.0
    compiled: bool = False
    consistency: Consistency | None = None

    def __post_init__(self) -> None:
        if self.restarts < 1:
            raise ValueError(f"restarts is the number of starts and must be at least 1, got {self.restarts}")
        if not 0 <= self.coarse < 1:
            raise ValueError(
                "coarse, the share of steps in bfloat16, must be at least 0 and below 1, since the last steps are in float32, "
                f"got {self.coarse}"
            )
        if self.consistency is not None and self.restarts < 2:
            raise ValueError(f"consistency compares several starts; set restarts to at least 2, got {self.restarts}")
        if self.consistency is not None and isinstance(self.optimiser, LBFGS):
            raise ValueError(
                "consistency cannot be used with the optimiser L-BFGS, since it is not part of the loss that L-BFGS minimises; "
                "choose another optimiser, such as adam"
            )

    @property
    def at_once(self) -> int:
        """Number of starts of a case that are searched at the same time."""
        return 1 if self.consistency is None else self.restarts


POLISH_VARIATION = 0.1
"""Ratio of the weight of the total variation at the end of a polish to `Prior.tv`, from which it falls (`Polish`)."""

MIN_POLISH_GAIN = 6.0
"""Smallest factor by which a polish must divide the squared distance of the gradients; else the first search's answer is kept. On
tuning images, polishes with larger factors made nearly all answers better. Those with smaller ones made as many worse: behind
networks whose gradients jump (ReLU with max pooling), and of clients whose local steps are treated as one."""


@dataclass(frozen=True, kw_only=True)
class Polish:
    """The settings of a second search, which begins at the best result of the first: L-BFGS on squared distances.

    Adam finds coarse examples from a random start, but approaches the minimum slowly; L-BFGS converges fast near it. Each tensor
    of the gradient is divided by its root mean square, so that layers with small gradients count as much as others. The weight of
    the total variation falls from `Prior.tv` to POLISH_VARIATION times it. The result is kept if it divides the distance by at
    least MIN_POLISH_GAIN.
    share: share of the gradient evaluations of a search, at its end, that L-BFGS makes; at least 0 and below 1.

    There is no second search for a null, nor after a search that was given up or interrupted, nor if clients draw random numbers
    or a defense adds noise of known variance, since L-BFGS would then fit what the true examples do not explain. There is none
    either if the state of a defense is simulated over rounds (`CaseBatch.in_order`), if the loss compares returned statistics of
    batch norm (such searches end far from the minimum, and need all steps of Adam), or with `Objective.robust`, whose scale is
    not that of squared distances.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"polish, the share of a search that L-BFGS makes, must be at least 0 and below 1, got {self.share}")

    def count_iterations(self, evaluations: int) -> int:
        """Return the number of iterations of L-BFGS, given the number of gradient evaluations of both searches together."""
        return int(self.share * evaluations) // LBFGS().period


COMPONENT_NAMES = ("objective", "simulation", "parametrisation", "prior", "labels", "search")


@dataclass(kw_only=True)
class MatchingSettings:
    """The parts and settings of a gradient matching attack.

    objective:  distance between simulated and observed gradients, with the weights of layers and observations.
    simulation: how a client's update is simulated. parametrisation: the optimised variable, its start and its box.
    prior:      assumptions about examples. labels: how labels are found. search: optimiser, steps, stopping, restarts, precision.
    warm_start: function of the cases and a generator that returns for each case examples to start from first, such as the answer
                of a closed form, or None. If they are fewer than the examples searched for, the parametrisation's start supplies
                the others. The parametrisation's start alone is tried afterwards if needed, see `WarmStart.alone`. A null uses no
                warm start.
    held:       dict from the name of a case (`Case.key`) to its examples that are known, and that the search leaves as they are.
                It must be empty for a null.
    polish:     a second search from the best result of the first; None for none.
    enhancer:   function that sharpens the images after the search, for the null as well; None for none.
    sees_gradient: False gives the null: the same search with the prior alone and random labels.
    """

    name: str
    objective: Objective = field(default_factory=Objective)
    simulation: Simulation = field(default_factory=Simulation)
    parametrisation: Parametrisation = field(default_factory=Parametrisation)
    prior: Prior = field(default_factory=Prior)
    labels: Labels = field(default_factory=Labels)
    search: Search = field(default_factory=Search)
    warm_start: WarmStartRule | None = None
    held: Mapping[str, HeldExamples] = field(default_factory=dict)
    polish: Polish | None = None
    enhancer: Enhancer | None = None
    sees_gradient: bool = True
    needs: frozenset[Need] = field(default=frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES}))
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.warm_start is not None and self.simulation.order_invariant:
            raise ValueError(
                "a warm start (closed_form_start or features) cannot be combined with order_invariant, which searches for "
                "separate examples in each local epoch; set order_invariant=0, or closed_form_start=false and features=false"
            )
        if self.warm_start is not None and self.search.consistency is not None:
            raise ValueError(
                "a warm start (closed_form_start or features) cannot be combined with consistency, which compares random starts; "
                "set consistency=0, or closed_form_start=false and features=false"
            )

    def build_polish(self, iterations: int) -> Self:
        """Return the settings of the second search, of this number of iterations, that `polish` describes."""
        variation = replace(self.prior.variation, continuation=1 / POLISH_VARIATION)
        return replace(
            self,
            objective=replace(self.objective, distance=euclidean, unit="root_mean_square"),
            prior=replace(self.prior, tv=POLISH_VARIATION * self.prior.tv, variation=variation),
            search=Search(optimiser=LBFGS(), steps=iterations, stop=PLATEAU_STOP),
            warm_start=None,
            polish=None,
        )

    def copy_with(self, **settings: Any) -> Self:
        """Return a copy of the attack with other settings, for example `cpl().copy_with(steps=20, later=1.0)`.

        A setting of a part, such as `Search.steps`, is given by its own name alone. Raises TypeError for a name that is neither a
        field of the attack nor of a part.
        """
        parts: dict[str, Any] = {}
        for part in COMPONENT_NAMES:
            known = {field.name for field in fields(getattr(self, part))}
            of_part = {name: settings.pop(name) for name in known & set(settings)}
            if of_part:
                parts[part] = replace(settings.pop(part, getattr(self, part)), **of_part)
        return replace(self, **settings, **parts)
