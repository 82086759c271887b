"""The expected cost of a replay, and the routes (methods that its attack tries in turn) that may apply, before it begins.

Measured times of gradient evaluations correct estimates of the cost from the sizes of network and batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attacker.attacks import Attack, AttackSpec, Case
from attacker.attacks.base import PlansRoutes, RoutePlan
from attacker.attacks.timing import time_evaluation
from attacker.replay.cases import PlannedCase
from attacker.replay.example_counts import add_estimate
from fedsim.recording import DamagedFile, Recording

ITERATION_ARGUMENTS = frozenset({"steps", "restarts", "patience", "give_up"})
"""Arguments of attacks that change the number of evaluations, and hardly the time of one."""
MAX_MEASURED_SECONDS = 2.0
"""Time in seconds of an evaluation above which no other attack is measured on updates of the same size: its estimate is corrected
by the same factor."""
MeasurementKey = tuple[Path, str, int, str, bool]
"""Folder and manifest of a recording, number of examples of an update, device, and whether a null is measured, whose evaluations
compute no gradient of the network."""

_MEASURED: dict[tuple[MeasurementKey, str], float] = {}
_SLOW: dict[MeasurementKey, float] = {}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The remaining work of a replay, estimated before it begins.

    cases:        number of cases to attack.
    chunks:       number of groups of cases that are attacked at once.
    evaluations:  largest number of gradient evaluations for one case, if every start is made: the evaluations of the search
                  (`Effort.most_evaluations`; 1 if the attack reports no number) plus the evaluations of the closed forms that may
                  apply to the first case.
    core_seconds: rough processor time in seconds of all cases on one core, if every case uses all `evaluations`, and no more;
                  estimated from a measured evaluation and the sizes of network and batches.
    reasons:      dict from each closed form of the attack to why it cannot apply to the first case, or "" if it may apply; empty
                  if this cannot be told.
    memory:       warning that the memory of the device may not suffice; "" for none.
    """

    cases: int
    chunks: int
    evaluations: int
    core_seconds: float
    reasons: Mapping[str, str] = field(default_factory=dict)
    memory: str = ""


def plan_routes(attack: Attack, recording: Recording, case: PlannedCase) -> RoutePlan:
    """Return which closed forms of an attack may apply to a case, and how many gradient evaluations these need.

    The result is empty if the case has several observations, if the observation cannot be read, or if the attack is not
    `PlansRoutes`, a protocol of attacks that can tell this before they attack.
    """
    if not isinstance(attack, PlansRoutes) or len(case.rows) != 1:
        return RoutePlan()
    try:
        return attack.plan(Case((recording.read_observation(case.rows[0]),)))
    except (ValueError, OSError, DamagedFile):
        return RoutePlan()


def describe_routes(forecast: Forecast) -> list[str]:
    """Return one text that lists the closed forms that may apply, and one per reason why others cannot apply.

    The list is empty if the forecast knows of no closed forms.
    """
    if not forecast.reasons:
        return []
    able = [route for route, reason in forecast.reasons.items() if not reason]
    by_reason: dict[str, list[str]] = {}
    for route, reason in forecast.reasons.items():
        by_reason.setdefault(reason, []).append(route)
    refused = [f"{', '.join(routes)} cannot: {reason}" for reason, routes in by_reason.items() if reason]
    return [f"closed forms that may apply: {', '.join(able) or 'none'}", *refused]


def measure_slowdown(
    recording: Recording, spec: AttackSpec, attack: Attack, case: PlannedCase, estimate: Callable[[Sequence[int]], float]
) -> float:
    """Return how many times as long as estimated one gradient evaluation for a case takes; 1 if it cannot be measured.

    It is measured on the first observation of the case, once in a process for each attack and number of examples.
    attack: the attack that `spec` builds. estimate: function from the numbers of examples of each observation to the estimated
    seconds.
    """
    key = (recording.folder, repr(recording.manifest), case.sizes[0], attack.device, spec.null)
    name = repr((spec.name, sorted((k, v) for k, v in spec.arguments.items() if k not in ITERATION_ARGUMENTS)))
    if (key, name) not in _MEASURED:
        _MEASURED[key, name] = _SLOW[key] if key in _SLOW else _measure(recording, spec, attack, case, estimate, key)
    return _MEASURED[key, name]


def _measure(
    recording: Recording,
    spec: AttackSpec,
    attack: Attack,
    case: PlannedCase,
    estimate: Callable[[Sequence[int]], float],
    key: MeasurementKey,
) -> float:
    try:
        observation, _ = add_estimate(recording.read_observation(case.rows[0]), reads_update=not spec.null)
    except (ValueError, OSError, DamagedFile):  # the attack itself reports it
        return 1.0
    seconds = time_evaluation(attack, Case((observation,)))
    if seconds is None:
        return 1.0
    ratio = seconds / estimate([case.sizes[0]])
    if seconds > MAX_MEASURED_SECONDS:
        _SLOW[key] = ratio
    return ratio
