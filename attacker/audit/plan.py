"""The attacks of an audit: chosen from what the recording offers, and sized to a time budget."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attacker.attacks import AttackSpec, presets
from attacker.audit.findings import NotChecked
from attacker.replay.replay import Replay
from fedsim.recording import Recording, Row

CANDIDATE_ATTACKS: tuple[tuple[str, dict[str, object] | None], ...] = (
    ("exact", {"fallback": "none"}),
    ("spans", {}),
    ("cohort_spans", {}),
    ("inverting_gradients", None),
    ("cpl", None),
)
"""Attacks in the order of their cost, with their arguments; None for the tuned preset of the network's family."""
JOINT_ATTACKS = frozenset({"spans", "cohort_spans"})
"""Attacks that use all rounds of a client together."""
CLIENT_COUNTS = (16, 8, 4, 2, 1)
"""Numbers of updates that an attack may be sized to, the largest that fits into the budget first."""
ATTACK_RULE = "attack"


@dataclass(frozen=True, kw_only=True)
class PlannedAttack:
    """An attack on a sample of the recorded updates, which its null is run on as well.

    rows:         the updates.
    core_seconds: expected time of attack and null on one core, if every search uses all its iterations.
    """

    spec: AttackSpec
    rows: tuple[Row, ...]
    core_seconds: float

    def replay(self, recording: Recording, out: Path, *, null: bool, model: str | None = None) -> Replay:
        """Return the replay of the attack or of its null."""
        spec = AttackSpec(name=self.spec.name, arguments=self.spec.arguments, null=null)
        rounds, clients = frozenset(row.round for row in self.rows), frozenset(row.client for row in self.rows)
        return Replay(recording=recording, spec=spec, out=out, rounds=rounds, clients=clients, model=model)


def plan_attacks(recording: Recording, out: Path, *, seconds: float) -> Iterator[PlannedAttack | NotChecked]:
    """Yield the attacks to run within the budget, and for each attack that does not fit or does not apply the reason.

    The first attack, of closed forms, always runs, on one update at least. Each of the others may take an equal share of what the
    cheaper ones have left. Attacks on single updates get those of the first complete round: its network has learned least, which
    makes examples easiest to separate. Attacks on several rounds get all rounds of each client.
    """
    rows = [row for row in recording.read_rows(on_damage=lambda error: None) if row.status == "complete"]
    if not rows:
        yield NotChecked(rule=ATTACK_RULE, reason="the recording holds no complete update to attack", kind="needs information")
        return
    left = seconds
    for place, (name, arguments) in enumerate(CANDIDATE_ATTACKS):
        spec = AttackSpec(name=name, arguments=_tuned(name, recording) if arguments is None else arguments)
        sizes = list(_sizes(recording, spec, rows, out))
        if reason := _explain_unfit(sizes[-1], recording, out):
            yield NotChecked(rule=ATTACK_RULE, reason=f"{name}: {reason}")
            continue
        share = left / (len(CANDIDATE_ATTACKS) - place)
        fitting = next((one for one in sizes if one.core_seconds <= share), None if place else sizes[-1])
        if fitting is None:
            reason = f"{spec} needs more computing time than is left of the {seconds:.0f} seconds: give more by --budget"
            yield NotChecked(rule=ATTACK_RULE, reason=reason, kind="left out")
            continue
        left -= fitting.core_seconds
        yield fitting


def _explain_unfit(one: PlannedAttack, recording: Recording, out: Path) -> str:
    """Return why an attack on several rounds cannot be used on a recording; "" if it can, and for attacks on single updates."""
    if one.spec.name not in JOINT_ATTACKS:
        return ""
    if len({row.round for row in one.rows}) < 2:
        return "it joins several rounds, and one is recorded"
    cases = one.replay(recording, out, null=False).plan.cases
    return "" if any(not case.reason for case in cases) else cases[0].reason


def _tuned(name: str, recording: Recording) -> dict[str, object]:
    return presets.get_arguments(name, "tuned", recording.manifest.model, recording.manifest.data)


def _sizes(recording: Recording, spec: AttackSpec, rows: list[Row], out: Path) -> Iterator[PlannedAttack]:
    """Yield the attack on the updates of fewer and fewer clients, with the forecast of each."""
    own = rows if spec.name in JOINT_ATTACKS else [row for row in rows if row.round == rows[0].round]
    clients = list(dict.fromkeys(row.client for row in own))
    for count in CLIENT_COUNTS:
        if count > len(clients) and count > 1 and CLIENT_COUNTS[CLIENT_COUNTS.index(count) + 1] >= len(clients):
            continue
        chosen = set(clients[:count])
        one = PlannedAttack(spec=spec, rows=tuple(row for row in own if row.client in chosen), core_seconds=0.0)
        forecast = one.replay(recording, out, null=False).estimate_work()
        yield PlannedAttack(spec=spec, rows=one.rows, core_seconds=2 * forecast.core_seconds)
