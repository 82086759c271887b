"""Attacks: callables that reconstruct training examples from what the server observed, composed of exchangeable parts."""

from attacker.attacks.answers import build_reconstruction
from attacker.attacks.base import Attack, Memory, Progress, find_unmet
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.multi_round.spans.attack import spans
from attacker.attacks.multi_round.spans.cohort_attack import cohort_spans
from attacker.attacks.needs import Need
from attacker.attacks.optimisers.stopping import Stop
from attacker.attacks.papers.accumulate import accumulate
from attacker.attacks.papers.agic import agic
from attacker.attacks.papers.closed_form import cocktail_party, exact, hgap, rgap, robbing_the_fed
from attacker.attacks.papers.feature_reconstruction import feature_reconstruction
from attacker.attacks.papers.matching import cpl, dlg, idlg, inverting_gradients
from attacker.attacks.papers.rog import rog
from attacker.attacks.registry import ATTACKS, AttackSpec

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
    "accumulate",
    "agic",
    "build_reconstruction",
    "cocktail_party",
    "cohort_spans",
    "cpl",
    "dlg",
    "exact",
    "feature_reconstruction",
    "find_unmet",
    "hgap",
    "idlg",
    "inverting_gradients",
    "rgap",
    "robbing_the_fed",
    "rog",
    "seed_generator",
    "spans",
]
