"""The expected cost of a replay, and the routes (methods that its attack tries in turn) that may apply, before it begins."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from attacker.attacks import Attack, Case
from attacker.attacks.base import PlansRoutes, RoutePlan
from attacker.replay.cases import PlannedCase
from fedsim.recording import DamagedFile, Recording


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
