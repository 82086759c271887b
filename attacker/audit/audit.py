"""The audit of a recorded federation: checks of its settings, attacks within a budget, and a graded verdict."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from attacker.attacks import ATTACKS
from attacker.audit.attack_findings import AuditedAttack, find_strongest_attack, judge_results
from attacker.audit.attack_runs import AttackRuns, RunReplay
from attacker.audit.canaries import check_canaries
from attacker.audit.defense_checks import check_defense, check_support
from attacker.audit.defense_outputs import measure_signature
from attacker.audit.findings import CheckResult, Finding, Grade, NotChecked, PassedCheck, find_worst_grade, order
from attacker.audit.label_checks import check_labels
from attacker.audit.noise_checks import check_noise
from attacker.audit.plan import CANDIDATE_ATTACKS, PlannedAttack, check_network, plan_attacks
from attacker.audit.privacy_checks import check_epsilon, check_robustness
from attacker.audit.setting_checks import check_settings
from attacker.audit.token_checks import check_tokens
from attacker.audit.training_checks import check_shape, check_training
from attacker.audit.weight_checks import check_weights
from attacker.audit.what_if import MeasuredChange
from attacker.replay.cases import find_bad_numbers
from attacker.replay.metadata import list_network_limits
from attacker.replay.replay import Replay
from attacker.scoring import Scorer
from fedsim.recording import DamagedFile, Observation, Recording, find_recording, find_run
from fedsim.recording.round_metrics import read_metrics
from fedsim.recording.run_check import check_run

BOUND_SECONDS, BOUND_SHARE = 30.0, 0.1
"""Largest time for bounds on the errors of the attacks, in seconds and as a share of the budget."""
MAX_CHECKED = 64
"""Largest number of updates that the checks read."""
UPDATES_RULE = "updates"
"""Rule of a `NotChecked` for updates that no check can read or use."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of an audit.

    run:         name of the run.
    findings:    problems, the worst first. passed: checks that found nothing. not_checked: checks and attacks that were not made,
                 or decided nothing, with reasons.
    attacks:     one result for each attack that ran.
    scored:      whether reconstructions were compared with the clients' true examples.
    seconds:     wall-clock time that the audit took.
    what_if:     measured effect of another defense; None if it was not asked for.
    """

    run: str
    findings: tuple[Finding, ...]
    passed: tuple[PassedCheck, ...]
    not_checked: tuple[NotChecked, ...]
    attacks: tuple[AuditedAttack, ...]
    scored: bool
    seconds: float
    what_if: MeasuredChange | None = None

    @property
    def grade(self) -> Grade:
        """Return the worst grade of the findings, or "none found" if there are none."""
        return find_worst_grade(self.findings)

    @property
    def has_answer(self) -> bool:
        """Return whether an attack reconstructed at least one update. If not, the grade follows from the checks alone."""
        return any(attack.has_answer for attack in self.attacks)

    def as_json(self) -> dict[str, Any]:
        """Return the audit, with its grade and `has_answer`, as a dict that can be written as JSON."""
        return {"grade": self.grade, "has_answer": self.has_answer, **asdict(self)}


def check_recording(recording: Recording) -> list[CheckResult]:
    """Return the results of the checks that need neither an attack nor the true examples, in a fixed order.

    At most `MAX_CHECKED` updates are read, and damaged ones and those with NaN or infinity are skipped, as a `NotChecked` says.
    Without any other, only the checks of weights, of epsilon and of missing rounds are made. Raises DamagedFile if all updates
    that are read are damaged, or if the weights of a round cannot be read.
    """
    sampled, damaged = _sample(recording)
    problems = [find_bad_numbers(observation) for observation in sampled]
    observations = [observation for observation, problem in zip(sampled, problems, strict=True) if not problem]
    metrics = read_metrics(recording.folder.parent)
    results: list[CheckResult] = [*check_weights(recording), *check_epsilon(recording, metrics)]
    recorded, trained = len(recording.list_rounds()), sum(row["round"] > 0 for row in metrics)
    if recorded < trained:
        reason = (
            f"only {recorded} of {trained} rounds are recorded, and the server receives the updates of all rounds, which "
            "together may reveal more"
        )
        results.append(NotChecked(rule="unrecorded-rounds", reason=reason, kind="no guarantee"))
    if damaged:
        count = f"{len(damaged)} damaged update{'s are' if len(damaged) > 1 else ' is'}"
        results.append(NotChecked(rule=UPDATES_RULE, reason=f"{count} left out of the checks; {damaged[0]}", kind="left out"))
    if any(problems):
        first = next(filter(None, problems))
        reason = f"{len(sampled) - len(observations)} of {len(sampled)} updates are left out of the checks; {first}"
        results.append(NotChecked(rule=UPDATES_RULE, reason=reason, kind="left out"))
    if not sampled:
        return [
            *results,
            NotChecked(rule=UPDATES_RULE, reason="the recording holds no complete update", kind="needs information"),
        ]
    if not observations:
        return results
    signature = None
    if (spec := observations[0].defenses).steps:
        signature = measure_signature(spec, observations[0].update)
    results += check_defense(observations, signature)
    results.append(check_support(observations, signature))
    results += check_noise(observations, signature)
    results += check_settings(recording, observations)
    results.append(check_training(observations))
    results += check_shape(recording.manifest.data)
    results += check_labels(observations)
    results += check_tokens(observations)
    if recording.manifest.gradient != "plain" or recording.manifest.inputs:
        names = ", ".join(filter(None, (recording.manifest.gradient, recording.manifest.inputs)))
        reason = f"{names}: applied before the update is computed, so that no check of updates can test it; only attacks can"
        results.append(NotChecked(rule="defense-of-training", reason=reason, kind="left out"))
    return results


def audit(
    run: Path,
    *,
    seconds: float = 600,
    truth: Sequence[Path] = (),
    model: str | None = None,
    run_replay: RunReplay = Replay.run,
    on_plan: Callable[[Sequence[PlannedAttack | NotChecked]], None] = lambda plan: None,
) -> Audit:
    """Check and attack a recorded run, and return the audit with graded findings.

    run:      folder of the run, or of its recording.
    seconds:  budget of time for the attacks, their nulls (the same attacks without the updates) and their scores. Attacks are
              chosen so that their expected processor time on one core fits into it, except that the first attack that suits the
              recording is always chosen. Attacks that still run when this much wall-clock time is used up are stopped (the first
              one and those whose time is not forecast not before `MIN_SECONDS`), and bounds on their errors that are expected to
              take more than `BOUND_SHARE` of it are left out; `not_checked` then says so.
    truth:    folders of the clients' true examples; without them, the confidence of the attacks decides whether examples leak,
              and no nulls run, since their errors could not be compared.
    model:    `module:function` of a function that builds the network, whose module is imported; only needed if the recorded
              network is not built in.
    run_replay: function that runs a `Replay`, an attack on the recording, and returns its result; for example one that also shows
              progress.
    on_plan:  callback that is called once, before the first attack, with the planned attacks, and a `NotChecked` with the reason
              for each attack left out.
    Planned attacks are skipped once an attack has recovered every compared example, and its null has not. Reconstructions and,
    if `truth` is given, scores are written to the run's folder. Cases that the same attack has already reconstructed there are
    not attacked again. Raises ValueError if `run` holds no recording.
    """
    started = monotonic()
    folder, run = find_recording(run), find_run(run)
    check_run(run)
    recording, out = Recording(folder), run / "reconstructions"
    check_network(recording)
    results = check_recording(recording)
    plan = list(plan_attacks(recording, out, seconds=seconds, nulls=bool(truth)))
    on_plan(plan)
    scorer = Scorer(run, list(truth), bound_seconds=min(BOUND_SECONDS, BOUND_SHARE * seconds)) if truth else None
    results += check_canaries(recording, scorer, read_metrics(run))
    runs = AttackRuns(recording=recording, out=out, scorer=scorer, model=model, run_replay=run_replay)
    runs.run(plan, seconds)
    results += runs.left_out
    results += judge_results(
        runs.attacks,
        scored=scorer is not None,
        defense=str(recording.manifest.defense),
        is_random=bool(list_network_limits(recording.manifest)),
    )
    results += check_robustness(recording, find_strongest_attack(runs.attacks) if scorer is not None else None)
    results += _list_mismatches(scorer)
    results += _list_missing_bounds(scorer)
    results += _list_other_attacks()
    return Audit(
        run=recording.manifest.name,
        findings=tuple(order([result for result in results if isinstance(result, Finding)])),
        passed=tuple(result for result in results if isinstance(result, PassedCheck)),
        not_checked=tuple(result for result in results if isinstance(result, NotChecked)),
        attacks=tuple(runs.attacks),
        scored=scorer is not None,
        seconds=monotonic() - started,
    )


def _list_mismatches(scorer: Scorer | None) -> list[NotChecked]:
    """Return a `NotChecked` for each reason why the true examples may be those of another run; empty without true examples."""
    reasons = dict.fromkeys(scorer.mismatches.values()) if scorer is not None else {}
    words = "the comparison with the true examples may be worthless"
    return [NotChecked(rule="truth", reason=f"{words}: {reason}", kind="no guarantee") for reason in reasons]


def _list_missing_bounds(scorer: Scorer | None) -> list[NotChecked]:
    """Return why errors of attacks have no lower bound, each reason once; without true examples, this is the only reason."""
    if scorer is None:
        reason = "lower bounds on the errors of attacks are computed from the true examples, which were not given"
        return [NotChecked(rule="bounds", reason=reason, kind="needs information")]
    reasons = dict.fromkeys(scorer.bounds.reasons.values()) if scorer.bounds is not None else {}
    return [NotChecked(rule="bounds", reason=reason, kind="left out") for reason in reasons]


def _list_other_attacks() -> list[NotChecked]:
    """Return a list with one `NotChecked` that names the attacks which no audit runs; empty if there are none."""
    names = ", ".join(sorted(set(ATTACKS) - {name for name, _ in CANDIDATE_ATTACKS}))
    kinds = "these attacks are special cases of those above, suit few networks, or need candidate images"
    reason = f"{kinds}; `attacker replay` runs them: {names}"
    return [NotChecked(rule="attack", reason=reason, kind="left out")] if names else []


def _sample(recording: Recording) -> tuple[list[Observation], list[DamagedFile]]:
    """Return up to `MAX_CHECKED` complete updates, evenly spread over the recording, and the errors of those that are damaged.

    The errors include those of all damaged rows of the index. Raises DamagedFile if there are complete updates, and each that was
    read is damaged.
    """
    damaged: list[DamagedFile] = []
    rows = [row for row in recording.read_rows(on_damage=damaged.append) if row.status == "complete"]
    step = max(1, -(-len(rows) // MAX_CHECKED))
    observations = []
    for row in rows[::step]:
        try:
            observations.append(recording.read_observation(row))
        except DamagedFile as error:
            damaged.append(error)
    if rows and not observations:
        raise damaged[-1]
    return observations, damaged
