"""Check of the accounted epsilon against what the server could guess about canaries."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attacker.audit.findings import CheckResult, Finding, NotChecked, Passed
from attacker.scoring import Scorer
from attacker.scoring.canaries import guess_canaries
from defenses.gradients import GradientSpec
from defenses.privacy.empirical import CONFIDENCE_LEVEL, bound_epsilon, bound_gaussian_epsilon
from defenses.privacy.sensitivity import find_gradient_noise, find_noise
from fedsim.recording import Recording

REFUTED_RULE = "epsilon-refuted"


def check_canaries(recording: Recording, scorer: Scorer | None, metrics: Sequence[Mapping[str, Any]]) -> Iterator[CheckResult]:
    """Yield whether guesses about canaries refute the accounted epsilon. metrics: rows of metrics.jsonl."""
    found = None if scorer is None else guess_canaries(scorer, recording)
    if found is None:
        reason = "no client planted canaries (clients.canaries), or only sums were recorded"
        if scorer is None:
            reason = "the clients' true examples, which would include planted canaries, are not given"
        yield NotChecked(rule=REFUTED_RULE, reason=reason, kind="needs information")
        return
    privacy = metrics[-1].get("privacy", {}) if metrics else {}
    accounted, delta = privacy.get("epsilon"), float(privacy.get("delta", 1e-5))
    bound = bound_gaussian_epsilon if _has_gaussian_noise(recording) else bound_epsilon
    epsilon = bound(found.right, found.guesses, canaries=found.canaries, delta=delta)
    told = "none, as no noise is accounted" if not isinstance(accounted, int | float) else f"{accounted:.3g}"
    evidence = (
        f"{found.right} of {found.guesses} guesses about {found.canaries} canaries are right: epsilon is at least {epsilon:.3g} "
        f"with a confidence of {CONFIDENCE_LEVEL:.0%}. The accountant's epsilon: {told}."
    )
    if isinstance(accounted, int | float) and math.isfinite(accounted) and epsilon > accounted:
        yield Finding(
            rule=REFUTED_RULE,
            grade="serious",
            title="The server learns more about single examples than the reported epsilon allows.",
            evidence=evidence,
            advice="Check that every client applies clipping and noise as declared, and that every release is accounted.",
        )
    else:
        yield Passed(rule=REFUTED_RULE, evidence=evidence)


def _has_gaussian_noise(recording: Recording) -> bool:
    """Return whether the declared noise is Gaussian, so that the sharper bound holds."""
    manifest, tensors = recording.manifest, len(recording.read_sent(recording.list_rounds()[0]).weights)
    declared = (
        find_noise(manifest.defense, tensors=tensors),
        find_gradient_noise(GradientSpec.parse(manifest.gradient), tensors=tensors),
    )
    return any(one.multiplier > 0 and one.family == "gaussian" for one in declared)
