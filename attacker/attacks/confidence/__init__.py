"""How sure an attack is of an answer: the estimated probability that each example is recovered."""

from attacker.attacks.confidence.curves import curve, probabilities
from attacker.attacks.confidence.evidence import (
    ComparedGradient,
    Judged,
    SearchAnswer,
    of_closed_form,
    of_prior,
    of_search,
    undecided,
)

__all__ = [
    "ComparedGradient",
    "Judged",
    "SearchAnswer",
    "curve",
    "of_closed_form",
    "of_prior",
    "of_search",
    "probabilities",
    "undecided",
]
