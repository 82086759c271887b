"""Attacks: functions from observations to reconstructions, put together from parts."""

from attacker.attacks.agic import agic
from attacker.attacks.base import Attack, Case, Memory, Need, Progress, unmet
from attacker.attacks.closed_forms import exact, hgap, rgap
from attacker.attacks.descent import Stop
from attacker.attacks.matching import GradientMatching
from attacker.attacks.papers import cpl, dlg, idlg, inverting_gradients
from attacker.attacks.spec import ATTACKS, AttackSpec, without_gradient

__all__ = [
    "ATTACKS",
    "Attack",
    "AttackSpec",
    "Case",
    "GradientMatching",
    "Memory",
    "Need",
    "Progress",
    "Stop",
    "agic",
    "cpl",
    "dlg",
    "exact",
    "hgap",
    "idlg",
    "inverting_gradients",
    "rgap",
    "unmet",
    "without_gradient",
]
