"""Execution of an audit as a job: checks of a recording, attacks on some of its updates, and a verdict in files."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from attacker.attacks import AttackSpec
from attacker.replay.executors import ray_cluster
from attacker.replay.replay import Replay, ReplayResult
from attacker.service.audit_files import make_audit_paths
from attacker.service.jobs.job import AuditSpec, ReplaySummary, Result, read_stored_spec
from attacker.service.worker.messages import JobTask, JobWatch
from attacker.service.worker.replay_results import make_replay_options, run_replay
from fedsim import models
from fedsim.recording import Recording

if TYPE_CHECKING:
    from attacker.audit import NotChecked
    from attacker.audit.plan import PlannedAttack

ATTACKS_SHARE = 0.95
"""Share of a job's progress that stands for the attacks; the rest is for bounds on their errors and for the page."""


@dataclass
class AuditWork:
    """An audit that a worker runs.

    watch: callback for the progress. summaries: results of the attacks and nulls that have run, in order. progress: the progress
    of the attacks, set once they are planned. scored: whether reconstructions were compared with the true examples; set when the
    audit is done.
    """

    task: JobTask
    watch: JobWatch
    summaries: list[ReplaySummary] = field(default_factory=list)
    progress: "AuditProgress | None" = None
    scored: bool = False

    @property
    def result(self) -> Result:
        """The results of the attacks and nulls that have run so far, for the queue.

        The audit's verdict is not part of the result: `run` writes it to files.
        """
        lack = "the audit has not come to its scores" if self.task.truth else "the service was given no truth of this recording"
        note = None if self.scored else lack
        return Result(attacks=tuple(self.summaries), scored=self.scored, score_note=note)

    def run(self) -> None:
        """Audit the recording, and write the verdict as an HTML page and as JSON. Raises the errors of `attacker.audit.audit`."""
        from attacker.audit import audit
        from attacker.audit.output import write

        task, spec, run = self.task, read_stored_spec(self.task.spec), Path(self.task.run)
        assert isinstance(spec, AuditSpec)
        if task.model is not None:
            models.admit(task.model, name=Recording(run / "recording").manifest.model.name)
        self.watch(0.0, "checking the recording")
        with ray_cluster.join_cluster(task.ray):
            result = audit(
                run,
                seconds=spec.seconds,
                truth=[Path(folder) for folder in task.truth],
                model=task.model,
                run_replay=self._replay,
                on_plan=self._receive_plan,
            )
        self.scored = result.scored
        for path in make_audit_paths(Path(task.audit)):
            write(result, run, path)

    def _receive_plan(self, plan: "Sequence[PlannedAttack | NotChecked]") -> None:
        from attacker.audit.plan import PlannedAttack

        seconds = {step.spec.name: step.core_seconds for step in plan if isinstance(step, PlannedAttack)}
        self.progress = AuditProgress(seconds, self.watch, nulls=bool(self.task.truth))

    def _replay(self, planned: Replay) -> ReplayResult:
        """Run one attack of the audit, or its null, with the options of the job, as `run_replay` does."""
        replay, progress = replace(planned, **make_replay_options(self.task)), self.progress
        assert progress is not None
        replayed = run_replay(
            replay, lambda done, cases, words: progress.report(replay.spec, done / max(1, cases), words), self.summaries
        )
        if replay.spec.null:  # an attack is compared with its null, which comes last
            progress.report(replay.spec, 1.0, "scoring, with lower bounds on the error")
        return replayed


@dataclass(frozen=True)
class AuditProgress:
    """The progress of an audit's attacks, by their expected times.

    seconds: dict from an attack's name to the expected core seconds of an attack and its null, in the order of the plan.
    watch: callback for the progress. nulls: whether a null runs after each attack.
    """

    seconds: dict[str, float]
    watch: JobWatch
    nulls: bool = True

    def report(self, attack: AttackSpec, share: float, message: str) -> None:
        """Report the progress of the audit while an attack, or its null, runs.

        An attack's null runs directly after the attack.
        attack: the attack or, if `attack.null` is set, its null; with nulls, each takes half of the time expected for both.
        share:  share of the attack, or of its null, that is done. message: text to add to the progress, or "".
        Attacks before this one in the plan count as done, also those that were left out.
        """
        names = list(self.seconds)
        place, total = names.index(attack.name), max(sum(self.seconds.values()), 1e-9)
        earlier = sum(self.seconds[name] for name in names[:place])
        done = earlier + self.seconds[attack.name] * (attack.null + share) / (1 + self.nulls)
        which = f"{attack.name}, null" if attack.null else attack.name
        left = describe_seconds(total - done)
        message = f"attack {place + 1} of {len(names)}: {which}; {left} left at most{'; ' if message else ''}{message}"
        self.watch(ATTACKS_SHARE * min(1.0, done / total), message)


def describe_seconds(seconds: float) -> str:
    """Return a duration as text, such as "40 s", "3 min" or "2.5 h"."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
