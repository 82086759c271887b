"""Check of the bound on reconstruction that follows from the declared noise, against what the attacks recovered."""

from collections.abc import Iterator

from scipy.stats import binom

from attacker.audit.attack_findings import AuditedAttack
from attacker.audit.findings import CheckResult, Finding, NotChecked, PassedCheck
from attacker.bounds import find_declared_noise
from defenses.privacy.accounting import compute_bound
from defenses.privacy.sensitivity import Noise
from fedsim.recording import Recording

ROBUSTNESS = "reconstruction-bound"
PRIOR = 0.01
"""Success probability of the best guess without any update, for which the bound is computed."""
MIN_USELESS_BOUND = 0.99
"""Smallest bound that is too weak to be reported."""
MAX_CHANCE = 0.01
"""The bound counts as exceeded if the observed number of recovered examples, or more, has less than this probability under it."""


def check_robustness(recording: Recording, strongest: AuditedAttack | None) -> Iterator[CheckResult]:
    """Yield one result on the probability of a reconstruction, which the declared noise bounds.

    It is a `Finding` if an attack recovers more than the bound and chance explain, a `NotChecked` without noise or with a useless
    bound, and otherwise a `PassedCheck` with the bound over all recorded rounds for an example that is guessed with probability
    `PRIOR` without any update.
    strongest: the attack to compare; None for no comparison, as without the true examples. The share of examples that it recovers
    is compared with the bound for one round, or for all rounds if it attacks them together. For this comparison, the probability
    of a guess is max(k, 1) / (n + 1), where the null, the attack without the updates, recovers k of n examples.
    Source: Hayes et al. 2023 and Balle et al. 2022, see `defenses.privacy.accounting.compute_bound`.
    """
    rounds = recording.list_rounds()
    noise, uses = find_declared_noise(recording) if rounds else (Noise(), 1)
    if not noise.multiplier > 0:
        reason = f"no noise bounds the probability of a reconstruction: {noise.why or 'no round is recorded'}"
        yield NotChecked(rule=ROBUSTNESS, reason=reason, kind="no guarantee")
        return
    if strongest is not None and strongest.examples:
        prior = max(strongest.null_recovered, 1) / (strongest.examples + 1)
        allowed = compute_bound(noise, prior=prior, times=uses * (len(rounds) if strongest.is_joint else 1))
        if float(binom.sf(strongest.recovered - 1, strongest.examples, allowed)) < MAX_CHANCE:
            yield Finding(
                rule=ROBUSTNESS,
                grade="serious",
                title="An attack recovers more than the declared noise allows.",
                evidence=f"{strongest.spec} recovers {strongest.recovered} of {strongest.examples} examples, and the declared "
                f"noise allows a share of {allowed:.1%}.",
                advice="Look for a defect of the defense: noise that is missing, too small, or drawn twice from one seed.",
            )
            return
    bound = compute_bound(noise, prior=PRIOR, times=uses * len(rounds))
    if bound >= MIN_USELESS_BOUND:
        over = f"{len(rounds)} recorded round{'s' * (len(rounds) != 1)}"
        reason = f"the declared noise is too small to bound the probability of a reconstruction over {over}"
        yield NotChecked(rule=ROBUSTNESS, reason=reason, kind="no guarantee")
        return
    yield PassedCheck(
        rule=ROBUSTNESS,
        evidence=f"under the declared noise, an example that is guessed with a probability of {PRIOR:.0%} without any update is "
        f"reconstructed with one of at most {bound:.1%} from {len(rounds)} round{'s' * (len(rounds) != 1)}",
    )
