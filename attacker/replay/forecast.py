"""The expected cost of a replay, and the routes (methods that its attack tries in turn) that may apply, before it begins.

A case is the observations that are attacked together: one round of a client, or several.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from attacker.attacks import Attack, Case
from attacker.attacks.base import Planning, RoutePlan
from attacker.replay.cases import Planned
from fedsim.recording import DamagedFile, Recording


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The remaining work of a replay, estimated before it begins.

    cases, chunks: number of cases to attack, and of the chunks that they are grouped into.
    evaluations:   largest number of gradient evaluations of one case; 1 if the attack does not search.
    core_seconds:  rough processor time of all cases on one core, from the sizes of network and batches, if every search uses all
                   evaluations.
    reasons:       dict from each closed form of the attack to why it cannot apply to the first case; "" if it may apply.
    """

    cases: int
    chunks: int
    evaluations: int
    core_seconds: float
    reasons: Mapping[str, str] = field(default_factory=dict)


def plan_routes(attack: Attack, recording: Recording, case: Planned) -> RoutePlan:
    """Return what the attack plans for a case: which of its methods may apply, and how many evaluations they need.

    The plan is empty if the case has several observations, if the attack makes no plans, or if the observation cannot be read.
    """
    if not isinstance(attack, Planning) or len(case.rows) != 1:
        return RoutePlan()
    try:
        return attack.plan(Case((recording.read_observation(case.rows[0]),)))
    except (ValueError, OSError, DamagedFile):
        return RoutePlan()


def describe_routes(forecast: Forecast) -> list[str]:
    """Return sentences on the closed forms that may apply, and on those that cannot, with their reasons; [] without any."""
    if not forecast.reasons:
        return []
    able = [route for route, reason in forecast.reasons.items() if not reason]
    by_reason: dict[str, list[str]] = {}
    for route, reason in forecast.reasons.items():
        by_reason.setdefault(reason, []).append(route)
    refused = [f"{', '.join(routes)} cannot: {reason}" for reason, routes in by_reason.items() if reason]
    return [f"closed forms that may apply: {', '.join(able) or 'none'}", *refused]
