"""Attacks: functions from observations to reconstructions, put together from parts."""

from attacker.attacks.base import Attack, Case, Need, Progress, unmet
from attacker.attacks.descent import Stop
from attacker.attacks.matching import GradientMatching
from attacker.attacks.papers import cpl, dlg, idlg, inverting_gradients, without_gradient
from attacker.attacks.spec import ATTACKS, AttackSpec

__all__ = [
    "ATTACKS",
    "Attack",
    "AttackSpec",
    "Case",
    "GradientMatching",
    "Need",
    "Progress",
    "Stop",
    "cpl",
    "dlg",
    "idlg",
    "inverting_gradients",
    "unmet",
    "without_gradient",
]
