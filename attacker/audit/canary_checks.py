"""Check of the accounted epsilon against guesses about canaries, pairs of known examples of which a client used one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attacker.audit.canary_guesses import CanaryGuesses, guess_canaries
from attacker.audit.findings import CheckResult, Finding, NotChecked, PassedCheck
from attacker.scoring import Scorer
from defenses.gradients import GradientSpec
from defenses.privacy.empirical import (
    CONFIDENCE_LEVEL,
    bound_epsilon,
    bound_epsilon_of_independent_guesses,
    bound_gaussian_epsilon,
)
from defenses.privacy.sensitivity import find_gradient_noise, find_noise
from fedsim.recording import Recording
from fedsim.recording.masked_vectors import SUM_CLIENT

REFUTED_RULE = "epsilon-refuted"
ACCUSATION_LEVEL = 0.999
"""Confidence with which an accounted epsilon must be refuted to become a finding. At 95 %, up to one correct epsilon in 20 would
become a finding."""


def check_canaries(recording: Recording, scorer: Scorer | None, metrics: Sequence[Mapping[str, Any]]) -> Iterator[CheckResult]:
    """Yield one result: whether guesses about canaries refute the privacy accountant's epsilon after the last round.

    A canary is a pair of known examples of which a client used one. The result is `NotChecked` without canaries or true examples.
    scorer: reads the true examples; None if they are not given. metrics: rows of metrics.jsonl; the last has this epsilon.
    """
    privacy = metrics[-1].get("privacy", {}) if metrics else {}
    accounted, delta = privacy.get("epsilon"), float(privacy.get("delta", 1e-5))
    declared = None
    if scorer is not None and isinstance(accounted, int | float) and recording.list_rounds() and _has_gaussian_noise(recording):
        declared = float(accounted)
    guesses = None if scorer is None else guess_canaries(scorer, recording, epsilon=declared, delta=delta)
    if guesses is None:
        reason = "no client planted canaries, from which epsilon is bounded from below; plant them by clients.canaries"
        if any(row.client == SUM_CLIENT for row in recording.read_rows(on_damage=lambda error: None)):
            reason = "only secure sums are recorded, and canaries are evaluated on updates of single clients"
        if scorer is None:
            reason = "the clients' true examples, which say which canaries were used, are not given (--truth)"
        yield NotChecked(rule=REFUTED_RULE, reason=reason, kind="needs information")
        return
    gaussian = _has_gaussian_noise(recording)
    epsilon = _bound(guesses, delta, gaussian=gaussian)
    stated = "none, as no noise is accounted" if not isinstance(accounted, int | float) else f"{accounted:.3g}"
    evidence = (
        f"{guesses.right_of_all} of {guesses.canaries} guesses about canaries are right, and {guesses.right} of the "
        f"{guesses.guesses} surest: epsilon is at least {epsilon:.3g} with a confidence of {CONFIDENCE_LEVEL:.0%}. "
        f"The accountant's epsilon: {stated}."
    )
    refuted = _bound(guesses, delta, gaussian=gaussian, confidence=ACCUSATION_LEVEL)
    if isinstance(accounted, int | float) and math.isfinite(accounted) and refuted > accounted:
        yield Finding(
            rule=REFUTED_RULE,
            grade="serious",
            title="The server learns more about single examples than the reported epsilon allows.",
            evidence=evidence,
            advice="Check that every client applies clipping and noise as declared, and that every release is accounted.",
        )
    else:
        yield PassedCheck(rule=REFUTED_RULE, evidence=evidence)


def _bound(counts: CanaryGuesses, delta: float, *, gaussian: bool, confidence: float = CONFIDENCE_LEVEL) -> float:
    """Return a lower bound on epsilon that holds with a probability of at least `confidence`.

    For Gaussian noise (`gaussian`), the bound is the larger of `bound_gaussian_epsilon` and
    `bound_epsilon_of_independent_guesses`; each is computed with the error probability (1 - confidence) / 2, so that both hold
    together. If the noise is not Gaussian, the bound is `bound_epsilon`.
    """
    if not gaussian:
        return bound_epsilon(counts.right, counts.guesses, canaries=counts.canaries, delta=delta, confidence=confidence)
    each = (1 + confidence) / 2
    return max(
        bound_gaussian_epsilon(counts.right, counts.guesses, canaries=counts.canaries, delta=delta, confidence=each),
        bound_epsilon_of_independent_guesses(
            counts.right_of_all, counts.canaries, delta=delta, overlap=counts.overlap, confidence=each
        ),
    )


def _has_gaussian_noise(recording: Recording) -> bool:
    """Return whether the defense or the gradient rule declares Gaussian noise that hides a message or an example."""
    manifest, tensors = recording.manifest, len(recording.read_sent(recording.list_rounds()[0]).weights)
    declared = (
        find_noise(manifest.defense, tensors=tensors),
        find_gradient_noise(GradientSpec.parse(manifest.gradient), tensors=tensors),
    )
    return any(noise.multiplier > 0 and noise.family == "gaussian" for noise in declared)
