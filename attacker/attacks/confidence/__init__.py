"""Confidence: an attack's estimate of the probability that each reconstructed example is recovered."""

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
