"""Confidence: an attack's estimate of the probability that each reconstructed example is recovered.

Recovered means close enough to the original, as `attacker.scoring.metrics.is_recovered` decides with the original at hand.
"""

from attacker.attacks.confidence.curves import INFERRED_ORDER, estimate_probabilities, find_curve
from attacker.attacks.confidence.doubts import MIN_LIKELY, doubt_likely, is_standardised
from attacker.attacks.confidence.estimates import (
    MIN_CERTIFIED_STAYS,
    ConfidenceEstimates,
    build_undecided,
    is_far_outside,
    judge_closed_form,
    judge_prior,
    judge_search,
)
from attacker.attacks.confidence.evidence import SearchAnswer, SimulatedObservation
from attacker.attacks.confidence.normalisations import WOULD_FILL, OtherNormalisation, find_other_normalisation

__all__ = [
    "INFERRED_ORDER",
    "MIN_CERTIFIED_STAYS",
    "MIN_LIKELY",
    "WOULD_FILL",
    "ConfidenceEstimates",
    "OtherNormalisation",
    "SearchAnswer",
    "SimulatedObservation",
    "build_undecided",
    "doubt_likely",
    "estimate_probabilities",
    "find_curve",
    "find_other_normalisation",
    "is_far_outside",
    "is_standardised",
    "judge_closed_form",
    "judge_prior",
    "judge_search",
]
