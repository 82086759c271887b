"""Checks against the declared noise: the privacy budget that the server reports, and the examples that attacks recover."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scipy.stats import binom

from attacker.audit.attack_findings import AuditedAttack
from attacker.audit.findings import CheckResult, Finding, NotChecked, PassedCheck
from attacker.bounds import find_declared_noise
from defenses.gradients import GradientSpec
from defenses.privacy.accounting import compute_bound, compute_epsilon
from defenses.privacy.sensitivity import Noise, find_gradient_noise, find_noise
from fedsim.recording import Recording
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.training.privacy import count_uses

EPSILON_RULE = "epsilon-understated"
EPSILON_SLACK = 0.01
"""Relative amount by which a reported epsilon may be below the computed one, since other accountants round differently."""
MAX_MEANINGFUL_EPSILON = 20.0
"""Largest epsilon that the audit reports without a warning. At 20, odds may change by a factor of e^20, about 5 * 10^8."""
ROBUSTNESS = "reconstruction-bound"
PRIOR = 0.01
"""Success probability of the best guess without any update, for which the bound is computed."""
MIN_USELESS_BOUND = 0.99
"""Smallest bound that is too weak to be reported."""
MAX_CHANCE = 0.01
"""The bound counts as exceeded if the observed number of recovered examples, or more, has less than this probability under it."""


def check_epsilon(recording: Recording, metrics: Sequence[Mapping[str, Any]]) -> Iterator[CheckResult]:
    """Yield the result: whether each reported epsilon is at least (1 - `EPSILON_SLACK`) times the one computed for its round.

    The computed epsilon follows from the declared noise, composed over the rounds. The result is a `NotChecked` if no epsilon is
    reported, or if epsilon depends on numbers of examples that are not recorded. If each reported epsilon is large enough, but
    the last is above `MAX_MEANINGFUL_EPSILON`, a second result follows: a `NotChecked` which says that such an epsilon promises
    hardly anything.
    metrics: rows of metrics.jsonl.
    """
    reported = [row for row in metrics if _read_privacy(row) is not None]
    if not reported:
        yield NotChecked(
            rule=EPSILON_RULE,
            reason="the run states no finite epsilon, so that no differential privacy is promised",
            kind="no guarantee",
        )
        return
    if _read_unit(reported[-1]) == "example" and not _list_reported_sizes(recording):
        reason = "the clients' numbers of examples are not recorded, which epsilon depends on"
        yield NotChecked(rule=EPSILON_RULE, reason=reason, kind="needs information")
        return
    size = _find_smallest_size(recording)
    low = [
        (row, expected)
        for row in reported
        if _read_epsilon(row) < (1 - EPSILON_SLACK) * (expected := _compute_expected_epsilon(recording, row, size))
    ]
    if not low:
        row = reported[-1]
        if _read_unit(row) == "example" and size is None:
            reason = (
                f"epsilon {_read_epsilon(row):.3g} is enough if no example was used twice; the recording does not show this, "
                "since a round uses only part of each client's examples"
            )
            yield NotChecked(rule=EPSILON_RULE, reason=reason, kind="needs information")
            return
        evidence = f"epsilon {_read_epsilon(row):.3g} after round {row['round']} is at least what the declared noise gives"
        yield PassedCheck(rule=EPSILON_RULE, evidence=evidence)
        if _read_epsilon(row) > MAX_MEANINGFUL_EPSILON:
            limit = f"above {MAX_MEANINGFUL_EPSILON:g} it promises hardly anything"
            reason = f"epsilon {_read_epsilon(row):.3g} is not understated, but {limit}"
            yield NotChecked(rule=EPSILON_RULE, reason=reason, kind="no guarantee")
        return
    row, expected = low[-1]
    values = {round(_read_epsilon(row), 9) for row in reported}
    reset = len(reported) > 1 and len(values) == 1
    cause = "It is the same in every round, as if each were the only one." if reset else "Perhaps a noisy message was left out."
    yield Finding(
        rule=EPSILON_RULE,
        grade="serious",
        title="The reported epsilon is smaller than the declared noise allows.",
        evidence=f"Round {row['round']}: epsilon {_read_epsilon(row):.3g} is reported, but the declared noise gives "
        f"{'no finite epsilon' if math.isinf(expected) else format(expected, '.3g')}. {cause}",
        advice="Account every noisy message and every round; quote the budget of the whole training.",
    )


def _read_privacy(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the mapping `privacy` of a row of metrics.jsonl, or None if its epsilon, for the clients' noise, is no number."""
    privacy = row.get("privacy")
    if not isinstance(privacy, Mapping) or not isinstance(privacy.get("epsilon"), int | float):
        return None
    return privacy


def _read_epsilon(row: Mapping[str, Any]) -> float:
    return float(row["privacy"]["epsilon"])


def _compute_expected_epsilon(recording: Recording, row: Mapping[str, Any], size: int | None) -> float:
    """Return the epsilon that follows from the declared noise, after the round of a row; infinite without noise.

    It is computed for a client that took part in every round. size: number of examples of the smallest client, which counts if
    epsilon protects single examples; if it is None, each example is assumed to be used once.
    """
    privacy, manifest, number = row["privacy"], recording.manifest, int(row["round"])
    tensors, delta = len(recording.read_sent(recording.list_rounds()[0]).weights), float(privacy.get("delta", 1e-5))
    client = find_noise(manifest.defense, tensors=tensors)
    if _read_unit(row) != "example":
        return _compute_epsilon(client, delta, number)
    uses = 1 if size is None else count_uses(manifest.training, size, 1, number)
    return _compute_epsilon(find_gradient_noise(GradientSpec.parse(manifest.gradient), tensors=tensors), delta, uses)


def _read_unit(row: Mapping[str, Any]) -> str:
    """Return what the reported epsilon protects: "client" or "example"; "None" if the row does not say it."""
    return str(row["privacy"].get("unit"))


def _list_reported_sizes(recording: Recording) -> list[int]:
    """Return the numbers of examples that clients reported; empty under secure aggregation, which hides them."""
    return [
        row.reported for row in recording.read_rows(on_damage=lambda error: None) if row.reported and row.client != SUM_CLIENT
    ]


def _find_smallest_size(recording: Recording) -> int | None:
    """Return the number of examples of the smallest client; None if the clients report no numbers, or hold more than is known.

    Clients of an experiment report how many distinct examples a round used. With a fixed number of steps, these are all examples
    of a client only if the steps have room for more.
    """
    most: dict[str, int] = {}
    for row in recording.read_rows(on_damage=lambda error: None):
        if row.reported and row.client != SUM_CLIENT:
            most[row.client] = max(row.reported, most.get(row.client, 0))
    training = recording.manifest.training
    known = [size for size in most.values() if training.steps is None or size < training.steps * training.step_size]
    return min(known, default=None)


def _compute_epsilon(noise: Noise, delta: float, times: int) -> float:
    return compute_epsilon(noise, delta=delta, times=times) if noise.multiplier > 0 else math.inf


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
