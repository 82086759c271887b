"""Execution of one job in a worker: an audit, or an attack, its null if requested, and scoring if there is truth."""

import traceback
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import torch

from attacker.attacks import AttackSpec
from attacker.replay.executors import ray_cluster
from attacker.replay.executors.worker_loop import Interrupt
from attacker.replay.replay import Replay
from attacker.service.jobs.job import JobSpec, ReplaySummary, Result
from attacker.service.worker.audit_execution import AuditWork
from attacker.service.worker.messages import JobOutcome, JobTask, JobWatch
from attacker.service.worker.replay_results import MAX_MESSAGE, count_done, make_replay_options, run_replay
from fedsim import models
from fedsim.recording import Recording
from fedsim.recording.files import hold_lock
from fedsim.recording.selection import parse_rounds

MAX_ERROR = 20_000
"""Largest number of characters of an error and of its traceback, which may quote a damaged file at any length."""
SCORING_SHARE = 0.05
"""Share of a job's progress that stands for scoring."""


def run_job(task: JobTask, interrupt: Interrupt, watch: JobWatch) -> JobOutcome:
    """Run a job, an attack or an audit, and return its outcome; an exception becomes the outcome "failed".

    Cases (updates attacked together) that earlier attempts finished are skipped. If the process of an earlier attempt still runs,
    it is waited for. interrupt: context in which SIGINT raises KeyboardInterrupt; the outcome is then "interrupted". watch:
    callback for the progress.
    """
    work: _JobRun | AuditWork = _JobRun(task, watch) if "attack" in task.spec else AuditWork(task, watch)
    try:
        with interrupt, hold_lock(Path(task.lock), wait=True):  # the process of an earlier attempt may not have ended yet
            work.run()
    except KeyboardInterrupt:
        return JobOutcome(
            state="interrupted", result=Result(attacks=work.result.attacks, score_note="it was stopped before it was scored")
        )
    except Exception as error:  # an error in this job must not prevent the next one
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        message = f"{reason[:MAX_ERROR]}\n\n{traceback.format_exc()[-MAX_ERROR:]}"
        return JobOutcome(state="failed", result=work.result, error=message)
    return JobOutcome(state="done", result=work.result)


WARM_MODULES = ("scipy.optimize",)
WARM_SCORING_MODULES = ("attacker.scoring",)


def import_modules(*, scores: bool) -> None:
    """Import modules that many jobs use, so that the first one starts faster. scores: whether to import modules for scoring."""
    torch.func.vmap(torch.func.grad(torch.sum))(torch.ones(1, 1))  # loads PyTorch's compiler with it
    for name in (*WARM_MODULES, *(WARM_SCORING_MODULES if scores else ())):
        import_module(name)


@dataclass
class _JobRun:
    task: JobTask
    watch: JobWatch
    summaries: list[ReplaySummary] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)
    scored: bool = False
    note: str | None = None

    @property
    def result(self) -> Result:
        return Result(attacks=tuple(self.summaries), scored=self.scored, score_note=self.note)

    def run(self) -> None:
        """Attack the recording, and score the reconstructions if the service has the truth. Raises the errors of `attack`."""
        self.attack()
        self.score()

    def attack(self) -> None:
        """Run the attack and then, if requested, its null.

        Raises RuntimeError if the attack has no reconstruction of any case, neither of this attempt at the job nor of an earlier
        one, and the errors of `Replay.run`.
        """
        spec, recording = JobSpec.from_stored(self.task.spec), Recording(Path(self.task.run) / "recording")
        if self.task.model is not None:
            models.admit(self.task.model, name=recording.manifest.model.name)
        kinds = (False, True) if spec.null else (False,)
        self.replays = [self._replay(spec, recording, null=null) for null in kinds]
        needs_cluster = self.task.ray is not None and any(count_done(replay) != len(replay.plan.cases) for replay in self.replays)
        with ray_cluster.join_cluster(self.task.ray if needs_cluster else None):
            for number, replay in enumerate(self.replays):
                self._run(replay, number)
                first = self.summaries[0]
                if not first.done + first.skipped:
                    reasons = "; ".join(dict.fromkeys(first.failed.values())) or "the recording holds none"
                    raise RuntimeError(f"no case could be attacked: {reasons}")

    def _replay(self, spec: JobSpec, recording: Recording, *, null: bool) -> Replay:
        task = self.task
        return Replay(
            recording=recording,
            spec=AttackSpec(name=spec.attack, arguments=spec.arguments, null=null),
            out=Path(task.run) / "reconstructions",
            seed=spec.seed,
            rounds=parse_rounds(spec.rounds),
            clients=frozenset(spec.clients) or None,
            **make_replay_options(task),
        )

    def _run(self, replay: Replay, number: int) -> None:
        def watch(done: float, cases: int, message: str) -> None:
            share = (number + done / max(1, cases)) / len(self.replays)
            self.watch((1 - SCORING_SHARE) * share, f"{'null, ' if replay.spec.null else ''}{message}")

        run_replay(replay, watch, self.summaries)

    def score(self) -> None:
        """Score the reconstructions.

        If there is no truth for this run, or scoring raises ValueError or OSError, `note` states why, and nothing is raised.
        """
        if not self.task.truth:
            self.note = "the service was given no truth of this recording"
            return
        from attacker.scoring import Scorer

        self.watch(1 - SCORING_SHARE, "scoring")
        try:
            scorer = Scorer(Path(self.task.run), [Path(folder) for folder in self.task.truth])
            for replay in self.replays:
                scorer.score(replay.folder, only={case.key for case in replay.plan.cases})
        except (ValueError, OSError) as error:
            self.note = f"not scored: {error}"[:MAX_MESSAGE]
            return
        self.scored = True
        unscored = sorted({key for keys in scorer.without_truth.values() for key in keys})
        if unscored:
            self.note = f"{len(unscored)} cases have no truth, the first: {unscored[0]}"
