"""Attacks by name, with their arguments: the specification is data, printed into every row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attacker.attacks.base import Attack
from attacker.attacks.matching import GradientMatching
from attacker.attacks.papers import cpl, dlg, idlg, inverting_gradients, without_gradient
from defenses.registry import Registry, bind

ATTACKS: Registry[Callable[..., GradientMatching]] = Registry(
    "attacker.attacks",
    {
        "cpl": cpl,
        "dlg": dlg,
        "idlg": idlg,
        "inverting_gradients": inverting_gradients,
    },
)


@dataclass(frozen=True, kw_only=True)
class AttackSpec:
    """An attack as data. null: the same attack without the gradient."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    null: bool = False

    def __post_init__(self) -> None:
        bind(self.name, ATTACKS[self.name], given=self.arguments)

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in sorted(self.arguments.items()))
        return f"{self.name}({shown})" + (" without gradient" if self.null else "")

    @property
    def knows_defense(self) -> bool:
        return bool(self.arguments.get("knows_defense", True))

    def build(self, *, device: str = "cpu") -> Attack:
        """The attack itself."""
        attack = replace(ATTACKS[self.name](**self.arguments), device=device)
        return without_gradient(attack) if self.null else attack
