"""How a client computes the gradient of one batch: plainly, or so that it tells less about any example."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from defenses._registry import Choice, Registry
from defenses.per_example import dp_sgd, fed_cdp
from defenses.rules import Facts, Gradient, GradientProblem, GradientRule, LocalStep, Weights, plain
from defenses.soteria import soteria

__all__ = [
    "GRADIENTS",
    "Facts",
    "Gradient",
    "GradientProblem",
    "GradientRule",
    "GradientSpec",
    "LocalStep",
    "Weights",
    "dp_sgd",
    "fed_cdp",
    "plain",
    "soteria",
]

GRADIENTS: Registry[Callable[..., GradientRule]] = Registry(
    "defenses.gradients", {"plain": plain, "dp_sgd": dp_sgd, "fed_cdp": fed_cdp, "soteria": soteria}
)


@dataclass(frozen=True)
class GradientSpec(Choice):
    """A rule for the gradient of one batch, by name."""

    registry: ClassVar[Registry[Callable[..., GradientRule]]] = GRADIENTS
    what: ClassVar[str] = "gradient"
    nothing: ClassVar[str] = "plain"

    def build(self) -> GradientRule:
        """The rule itself, for the client, and what an attacker who knows it makes of it."""
        rule: GradientRule = self.made()
        return rule
