"""Gradient rules: the registry of ways in which a client computes the gradient of one batch, such as DP-SGD."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from defenses.per_example import dp_sgd, fed_cdp
from defenses.registry import Choice, Registry
from defenses.rules import GradientRule, plain
from defenses.soteria import soteria

GRADIENTS: Registry[Callable[..., GradientRule]] = Registry(
    "defenses.gradients", {"plain": plain, "dp_sgd": dp_sgd, "fed_cdp": fed_cdp, "soteria": soteria}, setting="gradient"
)


@dataclass(frozen=True)
class GradientSpec(Choice):
    """Specification of a gradient rule, such as `dp_sgd(max_norm=1, noise=1.1)`; "plain" or "" for the usual gradient."""

    registry: ClassVar[Registry[Callable[..., GradientRule]]] = GRADIENTS
    what: ClassVar[str] = "gradient"
    nothing: ClassVar[str] = "plain"

    def build(self) -> GradientRule:
        """Return the rule: the client's computation of a batch's gradient, and the attacker's simulation of it."""
        rule: GradientRule = self.make()
        return rule
