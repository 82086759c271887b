"""Checks of whether recorded updates are outputs of the declared defense."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from attacker.audit.defense_outputs import (
    MAX_UNCHANGED_DIFFERENCE,
    Signature,
    apply,
    count_levels,
    draw_like,
    measure_change,
    measure_zero_share,
)
from attacker.audit.findings import CheckResult, Finding, NotChecked, PassedCheck
from defenses.spec import DefenseSpec
from fedsim.recording import Observation

ZERO_SLACK = 0.02
"""Amount by which an update's share of zeros may be below the signature's, because of ties and of rounding to whole numbers."""
LEVEL_SLACK = 2
"""Factor by which the number of distinct values of a tensor may exceed the signature's, which random updates gave."""
MAX_COMPARED = 20
"""Largest number of updates whose supports (sets of coordinates other than zero) are compared."""
BOUND_FACTOR = 2.0
"""Factor by which recorded updates are enlarged to test whether a defense with a limit would change larger ones."""
NOT_APPLIED_RULE = "defense-not-applied"
NEVER_BINDS_RULE = "defense-never-binds"
SUPPORT_RULE = "support-reveals-data"
MIN_SAME_SUPPORT = 0.999
"""Share of coordinates on which the supports of two random updates, defended with the same seed, must agree for the choice to
count as independent of the data."""


def check_defense(observations: Sequence[Observation], signature: Signature | None) -> Iterator[CheckResult]:
    """Yield results: whether the declared defense was applied to the updates, and whether its limit, if any, is ever reached.

    An update does not count as an output of the defense if it has fewer zeros or more distinct values than measured outputs, or
    is changed by a defense that leaves its own outputs unchanged. The only result is a `NotChecked` in three situations: the run
    declares no defense (`signature` is None); the defense ends with noise; or its outputs have neither more zeros nor fewer
    distinct values than other updates, and the defense changes its own outputs.
    """
    spec = observations[0].defenses
    if signature is None or not spec.steps:
        yield NotChecked(rule=NOT_APPLIED_RULE, reason="the run declares no defense of the update", kind="no guarantee")
        return
    if signature.additive:
        yield NotChecked(
            rule=NOT_APPLIED_RULE,
            reason="the last step of the defense is noise, which the checks noise-missing and noise-reused cover",
        )
        return
    if not (signature.idempotent or signature.zeros > ZERO_SLACK or signature.levels):
        reason = f"no property of the output of {spec} is known that can be checked"
        yield NotChecked(rule=NOT_APPLIED_RULE, reason=reason, kind="left out")
        return
    wrong = {
        observation.key: reason for observation in observations if (reason := _explain_difference(observation, spec, signature))
    }
    if wrong:
        key, reason = next(iter(wrong.items()))
        yield Finding(
            rule=NOT_APPLIED_RULE,
            grade="severe",
            title=f"The clients did not apply the declared defense {spec}.",
            evidence=f"{len(wrong)} of {len(observations)} updates cannot be its outputs. The first is {key}, {reason}.",
            advice="Check that the defense is configured on the clients and returns the changed update, not its input.",
        )
        return
    yield PassedCheck(
        rule=NOT_APPLIED_RULE, evidence=f"all {len(observations)} updates have the properties of an output of {spec}"
    )
    yield from _check_bound(observations, spec, signature)


def check_support(observations: Sequence[Observation], signature: Signature | None) -> CheckResult:
    """Return one result: a `Finding` if the choice of coordinates that the defense keeps (not zero) depends on the update.

    The defense is applied with the same seed to two random updates. If it keeps nearly the same coordinates of both, the choice
    does not depend on the update, and the result is `PassedCheck`. It is `NotChecked` if the defense leaves hardly any zeros, or
    quantises. A finding also says how much the kept coordinates of successive `observations` overlap. signature: None if the run
    declares no defense.
    """
    spec = observations[0].defenses
    if signature is None or signature.zeros <= ZERO_SLACK or signature.levels:
        return NotChecked(rule=SUPPORT_RULE, reason="no defense selects coordinates")
    supports = [_find_support(apply(spec, draw_like(observations[0].update, seed), 0)) for seed in (1, 2)]
    if float((supports[0] == supports[1]).float().mean()) >= MIN_SAME_SUPPORT:
        return PassedCheck(rule=SUPPORT_RULE, evidence=f"the choice of coordinates by {spec} does not depend on the update")
    recorded = [_find_support(observation.update) for observation in observations[:MAX_COMPARED]]
    common = [float((a & b).sum() / a.sum().clamp(min=1)) for a, b in pairwise(recorded)]
    chance = sum(float(support.float().mean()) for support in recorded) / len(recorded)
    share = (
        f" Successive updates have {sum(common) / len(common):.0%} of the kept coordinates in common; by chance it would be "
        f"{chance:.0%}."
        if common
        else ""
    )
    return Finding(
        rule=SUPPORT_RULE,
        grade="low",
        title="The data decide which coordinates a client sends.",
        evidence=f"{spec} keeps different coordinates in different updates.{share} Whoever sees a message sees which it keeps.",
        advice="Choose the coordinates at random (random_k). Otherwise attackers learn from the choice, for example labels.",
    )


def _find_support(update: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([(tensor != 0).flatten() for tensor in update.values()])


def _explain_difference(observation: Observation, spec: DefenseSpec, signature: Signature) -> str:
    """Return a relative clause on a property in which an update differs from outputs of the defense; "" if there is none.

    It is always "" for clients that send whole weights, whose rounding (`observation.rounding`) changes these properties.
    """
    update = observation.update
    if observation.rounding:  # the values of whole weights are rounded, and none is exactly zero
        return ""
    if signature.idempotent and (change := measure_change(apply(spec, update, 0), update)) > 10 * MAX_UNCHANGED_DIFFERENCE:
        return f"which the defense would change by {change:.1%} of its norm"
    if (zeros := measure_zero_share(update)) < signature.zeros - ZERO_SLACK:
        return f"where {zeros:.1%} of the coordinates are zero instead of {signature.zeros:.1%}"
    levels = count_levels(update)
    many = {name: levels[name] for name, maximum in signature.levels.items() if levels.get(name, 0) > LEVEL_SLACK * maximum}
    if many:
        name, count = next(iter(many.items()))
        return f"where {name} has {count} distinct values instead of at most {signature.levels[name]}"
    return ""


def _check_bound(observations: Sequence[Observation], spec: DefenseSpec, signature: Signature) -> Iterator[CheckResult]:
    """Yield at most one result: whether a defense that only limits updates, as clipping does, changed any recorded update.

    The recorded updates are outputs of the defense, which leaves its own outputs unchanged. It counts as having changed an update
    if it would change this update multiplied by `BOUND_FACTOR`. Nothing is yielded for defenses that do more than limit updates,
    nor if clients send whole weights, since an update then has rounding errors (`observation.rounding`).
    """
    if not signature.idempotent or signature.zeros > ZERO_SLACK or signature.levels or observations[0].rounding:
        return
    larger = [{name: BOUND_FACTOR * t for name, t in observation.update.items()} for observation in observations]
    if all(measure_change(apply(spec, update, 0), update) < MAX_UNCHANGED_DIFFERENCE for update in larger):
        yield Finding(
            rule=NEVER_BINDS_RULE,
            grade="low",
            title=f"The defense {spec} changes none of the recorded updates.",
            evidence=f"All {len(observations)} updates would be unchanged even if they were {BOUND_FACTOR:g} times as large.",
            advice="Lower its bound to the norm of the updates, or do not rely on this defense.",
        )
    else:
        yield PassedCheck(rule=NEVER_BINDS_RULE, evidence="the bound of the defense is reached")
