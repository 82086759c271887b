"""The attacks of an audit: chosen from what the recording offers, and sized to a time budget."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path

from attacker.attacks import Attack, AttackSpec, Case, Need, find_unmet, presets
from attacker.attacks.base import PlansRoutes
from attacker.attacks.matching.simulation import Simulation
from attacker.attacks.simulation.client import build_network, choose_simulated_steps, find_schedule
from attacker.audit.findings import NotChecked
from attacker.replay.batching import CaseFootprint
from attacker.replay.chosen_rows import ChosenRows
from attacker.replay.replay import Replay
from fedsim.recording import DamagedFile, Recording, Row

CANDIDATE_ATTACKS: tuple[tuple[str, dict[str, object] | None], ...] = (
    ("exact", {"fallback": "none"}),
    ("robbing_the_fed", {}),
    ("spans", {}),
    ("cohort_spans", {}),
    ("rog", {}),
    ("inverting_gradients", None),
    ("cpl", None),
    ("accumulate", {}),
    ("agic", None),
)
"""Attacks in the order of their cost, with their arguments; None for the tuned preset of the network's family."""
JOINT_ATTACKS = frozenset({"spans", "cohort_spans", "accumulate", "agic"})
"""Attacks that use all rounds of a client together."""
EPOCH_ARGUMENTS: dict[str, object] = {"local_steps": "simulated", "order_invariant": 1.0}
"""Further arguments of `agic` for several local epochs, the best of benchmarks/agic.py (Dimitrov et al. 2022)."""
ORDERED_STEPS = 4800
"""Gradient evaluations of `agic` for clients whose order of examples is searched for: with half as many, the searches in single
rounds found fewer images than those of Inverting Gradients (docs/many-rounds.md)."""
UNCOMPRESSED = frozenset({"clip", "clip_each", "gaussian", "laplace"})
"""Defenses that send every coordinate, and only scale tensors or add noise."""
CLIENT_COUNTS = (16, 8, 4, 2, 1)
"""Largest numbers of clients whose updates an attack is run on; of these, the largest that fits into the budget is chosen."""
SHORTENED_ATTACKS = {"inverting_gradients": 4, "agic": 2}
"""Attacks whose iterations are divided by this number if all of them do not fit into the budget even for one client. On twelve
images of the tuning part, a quarter of the iterations of Inverting Gradients lost 0.4 to 2.2 dB."""
ATTACK_RULE = "attack"


@dataclass(frozen=True, kw_only=True)
class PlannedAttack:
    """An attack on a sample of the recorded updates. Its null, the same attack without the updates, may run on the same sample.

    rows:         rows of the recording (one per client and round) with the updates to attack.
    core_seconds: expected time of attack and null together on one core, if every search uses all its starts and iterations; 0 if
                  not estimated. null_share: the null's share of it; 0 if no null runs.
    """

    spec: AttackSpec
    rows: tuple[Row, ...]
    core_seconds: float
    null_share: float = 0.5

    def replay(self, recording: Recording, out: Path, *, null: bool, model: str | None = None) -> Replay:
        """Return a `Replay`, not yet run, of the attack or of its null.

        out: folder for reconstructions. model: `module:function` that builds the network, only needed if it is not built in.
        Closed forms without a search solve one case after the other, so that those which are finished count if it is stopped.
        """
        spec = AttackSpec(name=self.spec.name, arguments=self.spec.arguments, null=null)
        rounds, clients = frozenset(row.round for row in self.rows), frozenset(row.client for row in self.rows)
        chunk = 1 if spec.arguments.get("fallback") == "none" else None
        return Replay(recording=recording, spec=spec, out=out, rounds=rounds, clients=clients, chunk=chunk, model=model)


def plan_attacks(recording: Recording, out: Path, *, seconds: float, nulls: bool = True) -> Iterator[PlannedAttack | NotChecked]:
    """Yield the attacks to run within the budget, and a `NotChecked` with the reason for each that does not fit or apply.

    seconds: budget of time on one core. The first attack that suits the recording always runs, on at least one client; it is
    usually `exact`, which solves equations instead of searching. The budget left before each attack is shared equally by it and
    the attacks after it. Attacks on single updates get the updates of the first round with a complete update, since the network
    of the first round has learned least, which makes examples easiest to separate, and of these the updates of the fewest
    examples first. Attacks on several rounds (`JOINT_ATTACKS`) get all rounds of each chosen client; clients with the most usable
    rounds are chosen first.
    out: as in `PlannedAttack.replay`. nulls: whether each attack's null runs as well, to compare their errors.
    """
    recorded = recording.read_rows(on_damage=lambda error: None)
    rows = [row for row in recorded if row.status == "complete"]
    if not rows:
        yield NotChecked(rule=ATTACK_RULE, reason=_explain_no_update(recorded), kind="needs information")
        return
    check_network(recording)
    first = _find_readable(rows, recording)
    fitting: list[list[PlannedAttack]] = []
    for name, arguments in CANDIDATE_ATTACKS:
        chosen = _choose_arguments(name, recording, first, scored=nulls) if arguments is None else arguments
        spec = AttackSpec(name=name, arguments=chosen)
        whole, reason = _fit(_select(spec, rows), recording, out)
        if reason:
            yield NotChecked(rule=ATTACK_RULE, reason=f"{name}: {reason}")
        else:
            fitting.append(list(_forecast_client_counts(recording, whole, out, nulls=nulls)))
    yield from _share_budget(fitting, seconds)


def check_network(recording: Recording) -> None:
    """Raise ValueError if the network, such as one that the user named, does not have the weights that the server sent."""
    footprint = CaseFootprint(recording.manifest, "cpu")
    ChosenRows(recording, None, None).check_weights(footprint.shapes, footprint.distinct)


def _explain_no_update(rows: Sequence[Row]) -> str:
    """Return that none of the recorded replies `rows` holds a complete update, with the reason of the first that failed."""
    failed = [row for row in rows if row.status == "failed"]
    why = f": {len(failed)} of {len(rows)} replies failed, the first because of: {failed[0].reason}" if failed else ""
    return f"the recording holds no complete update to attack{why}"


def _share_budget(fitting: Sequence[Sequence[PlannedAttack]], seconds: float) -> Iterator[PlannedAttack | NotChecked]:
    """Yield each attack on the most clients for which it fits into its share of the budget.

    fitting: for each attack, the same attack on fewer and fewer clients, or with fewer iterations, as `_forecast_client_counts`
    yields it. If an attack does not fit on any of these numbers of clients, a `NotChecked` is yielded for it; but the first
    attack then runs on the fewest clients.
    seconds: budget on one core.
    """
    left = seconds
    for place, sizes in enumerate(fitting):
        share = left / (len(fitting) - place)
        chosen = next((size for size in sizes if size.core_seconds <= share), None if place else sizes[-1])
        if chosen is None:
            enough = _find_budget(fitting, place)
            available = f"its share ({share:.1f} seconds) of the budget" if share > 0 else "earlier attacks leave of the budget"
            reason = (
                f"{sizes[-1].spec} needs {sizes[-1].core_seconds:.1f} seconds for a single client, more than "
                f"{available} of {seconds:.0f} seconds: give --budget {enough}s or more"
            )
            yield NotChecked(rule=ATTACK_RULE, reason=reason, kind="left out")
            continue
        left -= chosen.core_seconds
        yield chosen


def _find_budget(fitting: Sequence[Sequence[PlannedAttack]], place: int) -> int:
    """Return a budget in whole seconds that is enough for the attack at `place` on one client, whatever earlier attacks use.

    fitting: as in `_share_budget`. Let t be the time of the attack at `place` on one client. Two budgets are enough, and the
    smaller one is returned, rounded up, plus 1. The first is the time of all earlier attacks on the most clients, plus t times
    the number of attacks from `place` on. The second is the number of all attacks times the larger of t and the time of the first
    attack on one client, since the first attack runs in any case.
    """
    need, later = fitting[place][-1].core_seconds, len(fitting) - place
    before = sum(sizes[0].core_seconds for sizes in fitting[:place])
    return ceil(min(before + need * later, len(fitting) * max(need, fitting[0][-1].core_seconds))) + 1


def _fit(planned: PlannedAttack, recording: Recording, out: Path) -> tuple[PlannedAttack, str]:
    """Return the attack, and why it does not suit the recording; "" if it does.

    planned: the attack as `_select` returns it. A joint attack that suits is returned with its updates in another order: the
    updates of the clients with the most usable rounds come first.
    """
    joint = planned.spec.name in JOINT_ATTACKS
    needs_rounds = joint and not (planned.spec.name == "agic" and _has_epochs(recording))
    if needs_rounds and len(planned.rows) == len({row.client for row in planned.rows}):
        return planned, _explain_single_rounds(planned)
    if planned.spec.name == "rog" and all(step.name in UNCOMPRESSED for step in recording.manifest.defense.steps):
        return planned, "it is for compressed updates, and no compression is declared"
    if not joint:
        return planned, _find_unmet_need(planned, recording)
    cases = planned.replay(recording, out, null=False).plan.cases
    usable = {case.rows[0].client: len(case.rows) for case in cases if not case.reason}
    if not usable:
        return planned, cases[0].reason
    return replace(planned, rows=tuple(sorted(planned.rows, key=lambda row: -usable.get(row.client, 0)))), ""


def _explain_single_rounds(planned: PlannedAttack) -> str:
    """Return why a joint attack does not suit updates that are all of different clients."""
    several = len({row.round for row in planned.rows}) > 1
    if planned.spec.name == "agic":
        what = "only one round of each client" if several else "only one of each"
        return f"it needs several rounds or local epochs, and {what} is recorded"
    return f"it needs several rounds, and only one {'of each client ' if several else ''}is recorded"


def _find_unmet_need(planned: PlannedAttack, recording: Recording) -> str:
    """Return the first condition of an attack on single updates that its first undamaged update does not meet.

    For `exact` without a search, it is why none of its closed forms can apply. It is "" if all conditions are met, or if all
    updates are damaged.
    """
    try:
        case = Case((recording.read_observation(_find_readable(planned.rows, recording)),))
    except DamagedFile:  # the replay reports it
        return ""
    attack = planned.spec.build()
    if unmet := next(iter(find_unmet(attack, case)), ""):
        return unmet
    return _explain_no_closed_form(attack, case) if planned.spec.arguments.get("fallback") == "none" else ""


def _find_readable(rows: Sequence[Row], recording: Recording) -> Row:
    """Return the first row whose update is not damaged, or the first row if all are."""
    for row in rows:
        try:
            recording.read_observation(row)
        except DamagedFile:
            continue
        return row
    return rows[0]


def _explain_no_closed_form(attack: Attack, case: Case) -> str:
    """Return why no closed form of an attack can apply to a case; "" if one may apply, or if the attack cannot tell this."""
    try:
        reasons = attack.plan(case).reasons if isinstance(attack, PlansRoutes) else {}
    except ValueError:  # the replay reports it
        return ""
    if not reasons or not all(reasons.values()):
        return ""
    return "; ".join(["none of its closed forms applies", *dict.fromkeys(reasons.values())])


def _has_epochs(recording: Recording) -> bool:
    return (recording.manifest.training.epochs or 1) > 1


def _choose_arguments(name: str, recording: Recording, first: Row, *, scored: bool) -> dict[str, object]:
    """Return the arguments in the preset "tuned" of the attack `name`, for the recording's network.

    For "agic", if clients train several local epochs on more than one batch, `EPOCH_ARGUMENTS` are added, so that it simulates
    the epochs; if each epoch is one step, or the order of examples is searched for, it does so anyway. In the latter case it has
    `ORDERED_STEPS`. For "inverting_gradients", if clients take several local steps, `surrogate` is added, unless it searches for
    the order of their examples, but only if answers are `scored` against the truth, since the confidence in answers of such
    searches is undecided. If clients do not train a last linear layer, as with adapters, "cpl" searches for the labels as well.
    first: the first row, with a complete update.
    """
    tuned = dict(presets.get_arguments(name, "tuned", recording.manifest.model, recording.manifest.data))
    if name == "cpl" and not _has_label_layer(recording, first):
        tuned["label_rule"] = "joint"
    ordered = _is_ordered(recording, first)
    if name == "agic" and ordered:
        return {**tuned, "steps": ORDERED_STEPS}
    if name == "agic" and _has_epochs(recording) and not _repeats_batch(recording, first):
        return {**tuned, **EPOCH_ARGUMENTS}
    if name == "inverting_gradients" and scored and _count_steps(recording, first) > 1 and not ordered:
        return {**tuned, "surrogate": True}
    return tuned


def _repeats_batch(recording: Recording, row: Row) -> bool:
    """Return whether the client of a row takes several local steps, each on all of its examples."""
    return choose_simulated_steps(recording.manifest.training, row.num_examples or 0) > 1


def _is_ordered(recording: Recording, row: Row) -> bool:
    """Return whether the order of the examples of a row's client is searched for, see `Simulation.count_ordered_steps`.

    False for clients that declare a defense or received buffers, whose searches may have no polish.
    """
    try:
        seen = recording.read_observation(row)
    except DamagedFile:  # the replay reports it
        return False
    plain = not (seen.defenses.steps or seen.gradient.step or seen.buffers)
    return plain and Simulation(local_steps="auto").count_ordered_steps([seen], build_network(seen)) > 1


def _has_label_layer(recording: Recording, row: Row) -> bool:
    """Return whether clients train a last layer from which labels are read; true if the update of the row is damaged."""
    try:
        return Need.LINEAR_HEAD.is_met(Case((recording.read_observation(row),)))
    except DamagedFile:  # the replay reports it
        return True


def _count_steps(recording: Recording, row: Row) -> int:
    """Return the number of local steps assumed for a row's client; 1 if the update or its number of examples is not usable."""
    try:
        return find_schedule(recording.read_observation(row))[1]
    except (DamagedFile, ValueError):  # the replay reports it
        return 1


def _select(spec: AttackSpec, rows: Sequence[Row]) -> PlannedAttack:
    """Return an attack on updates of `CLIENT_COUNTS[0]` clients, or of all if there are fewer; `core_seconds` is 0.

    Joint attacks get all updates of the clients with the most rounds. Others get updates of the first round in `rows`, those of
    the fewest examples first: they are attacked most easily, and some closed forms apply only to a single example.
    """
    rounds = Counter(row.client for row in rows)
    if spec.name in JOINT_ATTACKS:
        ordered = sorted(rows, key=lambda row: -rounds[row.client])
    else:
        ordered = sorted((row for row in rows if row.round == rows[0].round), key=lambda row: row.num_examples or inf)
    return _keep_clients(PlannedAttack(spec=spec, rows=tuple(ordered), core_seconds=0.0), CLIENT_COUNTS[0])


def _keep_clients(planned: PlannedAttack, count: int) -> PlannedAttack:
    """Return the attack on the updates of `count` clients only, the first ones in `one.rows`."""
    chosen = set(list(dict.fromkeys(row.client for row in planned.rows))[:count])
    return replace(planned, rows=tuple(row for row in planned.rows if row.client in chosen))


def _forecast_client_counts(recording: Recording, planned: PlannedAttack, out: Path, *, nulls: bool) -> Iterator[PlannedAttack]:
    """Yield the attack, with its forecast time, on updates of up to 16, 8, 4, 2 and 1 clients (`CLIENT_COUNTS`), in this order.

    A count is left out if the next smaller one includes all clients already. One of `SHORTENED_ATTACKS` on one client, with
    fewer iterations, is yielded last. planned: the attack on all clients to choose from.
    nulls: whether the time includes that of the null.
    """
    clients = {row.client for row in planned.rows}
    smaller = planned
    for count in CLIENT_COUNTS:
        if count > len(clients) and count > 1 and CLIENT_COUNTS[CLIENT_COUNTS.index(count) + 1] >= len(clients):
            continue
        smaller = _keep_clients(planned, count)
        yield _forecast(recording, smaller, out, nulls=nulls)
    name, arguments = planned.spec.name, planned.spec.arguments
    if name in SHORTENED_ATTACKS and "steps" in arguments:
        spec = AttackSpec(name=name, arguments={**arguments, "steps": arguments["steps"] // SHORTENED_ATTACKS[name]})
        yield _forecast(recording, replace(smaller, spec=spec), out, nulls=nulls)


def _forecast(recording: Recording, planned: PlannedAttack, out: Path, *, nulls: bool) -> PlannedAttack:
    """Return the attack with its forecast time. nulls: whether the time includes that of the null."""
    attack = planned.replay(recording, out, null=False).estimate_work().core_seconds
    null = planned.replay(recording, out, null=True).estimate_work().core_seconds if nulls else 0.0
    return replace(planned, core_seconds=attack + null, null_share=null / (attack + null) if attack + null else 0.5 * nulls)
