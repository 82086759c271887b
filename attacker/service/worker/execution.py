"""Execution of one job: the replay, the null's replay, and scoring if there is truth."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import torch

from attacker.attacks import AttackSpec
from attacker.replay.executors import ray_cluster
from attacker.replay.executors.worker_loop import Interrupt
from attacker.replay.replay import Replay, Replayed
from attacker.replay.tasks import is_done
from attacker.service.jobs.job import Attacked, JobSpec, Result
from attacker.service.worker.messages import JobOutcome, JobTask
from attacker.service.worker.preview_files import Painter
from fedsim import models
from fedsim.recording import Recording
from fedsim.recording.files import hold_lock
from fedsim.recording.selection import parse_rounds

CHECKPOINT_SECONDS = 20.0
"""Seconds between two checkpoints: what a killed service costs at most."""
MAX_MESSAGES = 500
"""Reasons, or notes, that are told; all of them are in the files."""
MAX_MESSAGE = 300
"""Characters of each."""
MAX_ERROR = 20_000
"""Characters of an error, and of its traceback: a file that makes no sense may be quoted in them at any length."""
SCORING_SHARE = 0.05
"""The share of a job that scoring counts for."""

JobWatch = Callable[[float, str], None]
"""Is called with the share of the job that is done, in [0, 1], and a few words."""


def run_job(task: JobTask, interrupt: Interrupt, watch: JobWatch) -> JobOutcome:
    """Run a job and return its outcome; exceptions become the outcome "failed".

    Finished cases of earlier attempts are skipped.
    """
    work = _Work(task, watch)
    try:
        with interrupt, hold_lock(Path(task.lock), wait=True):  # the process of an earlier attempt may not have ended yet
            work.attack()
            work.score()
    except KeyboardInterrupt:
        return JobOutcome(
            state="interrupted", result=Result(attacks=tuple(work.parts), score_note="it was ended before it was scored")
        )
    except Exception as error:  # an error in this job must not prevent the next one
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        told = f"{reason[:MAX_ERROR]}\n\n{traceback.format_exc()[-MAX_ERROR:]}"
        return JobOutcome(state="failed", result=work.result, error=told)
    return JobOutcome(state="done", result=work.result)


WARM_MODULES = ("scipy.optimize",)
WARM_SCORING_MODULES = ("attacker.scoring", "skimage.io", "sklearn.datasets")


def import_modules(*, scores: bool) -> None:
    """Import the modules that the first job needs, without reading a recording. scores: whether jobs are scored."""
    torch.func.vmap(torch.func.grad(torch.sum))(torch.ones(1, 1))  # loads PyTorch's compiler with it
    for name in (*WARM_MODULES, *(WARM_SCORING_MODULES if scores else ())):
        import_module(name)


@dataclass
class _Work:
    task: JobTask
    watch: JobWatch
    parts: list[Attacked] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)
    scored: bool = False
    note: str | None = None

    @property
    def result(self) -> Result:
        return Result(attacks=tuple(self.parts), scored=self.scored, score_note=self.note)

    def attack(self) -> None:
        """Run the attack, then its null. Raises RuntimeError if no case could be attacked, and the errors of `Replay.run`."""
        spec, recording = JobSpec.from_stored(self.task.spec), Recording(Path(self.task.run) / "recording")
        if self.task.model is not None:
            models.admit(self.task.model, name=recording.manifest.model.name)
        kinds = (False, True) if spec.null else (False,)
        self.replays = [self._replay(spec, recording, null=null) for null in kinds]
        with self._join_cluster():
            for number, replay in enumerate(self.replays):
                self._run(replay, number)
                first = self.parts[0]
                if not first.done + first.skipped:
                    reasons = "; ".join(dict.fromkeys(first.failed.values())) or "the recording holds none"
                    raise RuntimeError(f"no case could be attacked: {reasons}")

    def _join_cluster(self) -> AbstractContextManager[None]:
        """Return a context that connects to the job's Ray cluster, shared by its replays; an empty one if no case is left."""
        if self.task.ray is None or all(_count_done(replay) == len(replay.plan.cases) for replay in self.replays):
            return nullcontext()
        return ray_cluster.join_cluster(self.task.ray)

    def _replay(self, spec: JobSpec, recording: Recording, *, null: bool) -> Replay:
        task = self.task
        return Replay(
            recording=recording,
            spec=AttackSpec(name=spec.attack, arguments=spec.arguments, null=null),
            out=Path(task.run) / "reconstructions",
            seed=spec.seed,
            device=task.device,
            rounds=parse_rounds(spec.rounds),
            clients=frozenset(spec.clients) or None,
            threads=task.threads,
            ray=task.ray,
            model=task.model,
            every=CHECKPOINT_SECONDS,
            look=Painter(Path(task.preview)),
        )

    def _run(self, replay: Replay, number: int) -> None:
        def watch(done: float, cases: int, words: str) -> None:
            share = (number + done / max(1, cases)) / len(self.replays)
            self.watch((1 - SCORING_SHARE) * share, f"{'null, ' if replay.spec.null else ''}{words}")

        before = _count_done(replay)
        try:
            replayed = replay.run(watch)
        except KeyboardInterrupt:
            written = Replayed(replay.folder, done=_count_done(replay) - before, skipped=before)
            self.parts.append(_make_result(replay, written))
            raise
        self.parts.append(_make_result(replay, replayed))

    def score(self) -> None:
        """Score the reconstructions, if the service has the truth of this run."""
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
        untold = sorted({key for keys in scorer.untold.values() for key in keys})
        if untold:
            self.note = f"{len(untold)} cases have no truth, the first: {untold[0]}"


def _count_done(replay: Replay) -> int:
    return sum(is_done(replay.folder, case.key) for case in replay.plan.cases)


def _make_result(replay: Replay, replayed: Replayed) -> Attacked:
    failed = {key[:MAX_MESSAGE]: reason[:MAX_MESSAGE] for key, reason in list(replayed.failed.items())[:MAX_MESSAGES]}
    notes = [*replayed.notes, *_list_left_out(replayed)]
    if len(failed) < len(replayed.failed):
        notes.insert(0, f"{len(replayed.failed)} cases failed; the first {MAX_MESSAGES} are told")
    return Attacked(
        source=replay.folder.name,
        null=replay.spec.null,
        done=replayed.done,
        skipped=replayed.skipped,
        failed=failed,
        routes=replayed.routes,
        notes=tuple(note[:MAX_MESSAGE] for note in notes[:MAX_MESSAGES]),
    )


def _list_left_out(replayed: Replayed) -> Sequence[str]:
    return [f"{key}: round {round} was left out: {why}" for key, rounds in replayed.left_out.items() for round, why in rounds]
