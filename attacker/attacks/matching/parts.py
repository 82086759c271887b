"""The parts that a gradient matching attack is composed of."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from attacker.attacks.base import Need
from attacker.attacks.labels.rules import LabelRule, inferred
from attacker.attacks.matching.objectives import Objective
from attacker.attacks.matching.parametrisation import Parametrisation
from attacker.attacks.matching.priors import Prior
from attacker.attacks.matching.simulation import Simulation
from attacker.attacks.matching.warm_starts import First
from attacker.attacks.optimisers.descent import PLATEAU, Stop
from attacker.attacks.optimisers.first_order import Optimiser
from attacker.attacks.optimisers.lbfgs import LBFGS


@dataclass(frozen=True, kw_only=True)
class Labels:
    """How the labels of examples are found.

    rule:      reads them off the gradient; None: they are searched for with the examples, as soft labels (DLG).
    agreement: weight of the squared distance between predicted probabilities and labels (CPL's alpha), or between logits and
               those of the true examples where an oracle tells them.
    """

    rule: LabelRule | None = inferred
    agreement: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Search:
    """How a minimum is searched for. Steps of an optimiser are steps in the latent, whatever the normalisation.

    optimiser, steps, stop: steps are counted in the optimiser's periods.
    restarts: at most so many starts a case: another one only where the last is stuck; the lowest own loss is kept.
    coarse:   share of the steps, from the first on, whose convolutions are computed in bfloat16, where the device has it and all
              problems share weights; the rest is in float32, and what is kept is the best of that.
    compiled: have PyTorch compile the comparison, which pays for small networks and long searches; see `compiled`.
    """

    optimiser: Optimiser = field(default_factory=LBFGS)
    steps: int = 300
    stop: Stop = PLATEAU
    restarts: int = 1
    coarse: float = 0.0
    compiled: bool = False

    def __post_init__(self) -> None:
        if self.restarts < 1:
            raise ValueError(f"restarts counts the starts of a search, of which one is the least, got {self.restarts}")
        if not 0 <= self.coarse < 1:
            raise ValueError(f"coarse is a share of the steps in [0, 1): the last ones are in float32, got {self.coarse}")


PARTS = ("objective", "simulation", "parametrisation", "prior", "labels", "search")


@dataclass(kw_only=True)
class MatchingParts:
    """All settings of a gradient matching attack.

    objective:  distance between simulated and observed gradients, and what counts in it how much.
    simulation: how a client's update is simulated. parametrisation: what is optimised, from where, and within which box.
    prior:      what is believed of examples. labels: how they are found. search: optimiser, steps, stopping, restarts, precision.
    warm_start: from the cases, a closed form's inexact answer for each, or None: a start before those of the parametrisation,
                which makes up for missing examples. Unless a search from there converges, the first of those is tried as well:
                noise can spoil an answer.
    sees_gradient: False gives the null: the same search by the prior alone, with random labels.
    """

    name: str
    objective: Objective = field(default_factory=Objective)
    simulation: Simulation = field(default_factory=Simulation)
    parametrisation: Parametrisation = field(default_factory=Parametrisation)
    prior: Prior = field(default_factory=Prior)
    labels: Labels = field(default_factory=Labels)
    search: Search = field(default_factory=Search)
    warm_start: First | None = None
    sees_gradient: bool = True
    needs: frozenset[Need] = field(default=frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES}))
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.warm_start is not None and self.simulation.order_invariant:
            raise ValueError("a given start holds each example once, and order_invariant searches for one in each local epoch")

    def changed(self, **settings: Any) -> Self:
        """Return the attack with other settings, each named by itself: `cpl().changed(steps=20, later=1.0)`.

        Fields of parts go into their part. Raises TypeError where neither the attack nor a part has such a field.
        """
        parts: dict[str, Any] = {}
        for part in PARTS:
            known = {one.name for one in fields(getattr(self, part))}
            own = {name: settings.pop(name) for name in known & set(settings)}
            if own:
                parts[part] = replace(settings.pop(part, getattr(self, part)), **own)
        return replace(self, **settings, **parts)
