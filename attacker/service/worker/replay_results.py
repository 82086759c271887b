"""Results of a job's replays, as the service stores them, and the options that all replays of a job share."""

from pathlib import Path
from typing import Any

from attacker.replay.replay import Replay, ReplayResult
from attacker.replay.results import is_done
from attacker.replay.tasks import Watch
from attacker.service.jobs.job import ReplaySummary
from attacker.service.worker.messages import JobTask
from attacker.service.worker.preview_files import Painter

CHECKPOINT_SECONDS = 20.0
"""Seconds between two checkpoints, the most that is lost if the service is killed."""
STOPPED_CASES = "cases whose search was stopped, with its best result so far, from which a repeated job continues"
MAX_MESSAGES = 500
"""Largest number of reasons and of notes in a result; the files hold all of them."""
MAX_MESSAGE = 300
"""Largest number of characters of a reason or note in a result."""


def make_replay_options(task: JobTask) -> dict[str, Any]:
    """Return those keyword arguments of `Replay` that say where and how a job computes, not what it attacks.

    They are the PyTorch device, the number of threads, the address of the Ray cluster, the function that builds the model, the
    seconds between checkpoints, and the callback that writes the preview.
    """
    return {
        "device": task.device,
        "threads": task.threads,
        "ray": task.ray,
        "model": task.model,
        "every": CHECKPOINT_SECONDS,
        "look": Painter(Path(task.preview)),
    }


def count_done(replay: Replay) -> int:
    """Return the number of cases of a replay that have a finished reconstruction, by this or an earlier job."""
    return sum(is_done(replay.folder, case.key) for case in replay.plan.cases)


def run_replay(replay: Replay, watch: Watch, summaries: list[ReplaySummary]) -> ReplayResult:
    """Run one replay of a job, add its results to `summaries`, and return what was done.

    watch: callback for the progress. After an interruption, the results so far are added before KeyboardInterrupt is raised, with
    a note of how many searches were stopped.
    """
    done_before = count_done(replay)
    try:
        replayed = replay.run(watch)
    except KeyboardInterrupt:
        from attacker.scoring.states import read_case  # scoring takes seconds to import

        stopped = sum(read_case(replay.folder, case.key)[1] == "interrupted" for case in replay.plan.cases)
        done = count_done(replay) - done_before
        notes = [f"{STOPPED_CASES}: {stopped}"] if stopped else []
        summaries.append(_make_result(replay, ReplayResult(replay.folder, done=done, skipped=done_before, notes=notes)))
        raise
    summaries.append(_make_result(replay, replayed))
    return replayed


def _make_result(replay: Replay, replayed: ReplayResult) -> ReplaySummary:
    """Return the results of one replay in the form in which the queue stores them.

    At most `MAX_MESSAGES` reasons of failed cases and at most `MAX_MESSAGES` remarks are kept, each cut after `MAX_MESSAGE`
    characters.
    """
    failed = {key[:MAX_MESSAGE]: reason[:MAX_MESSAGE] for key, reason in list(replayed.failed.items())[:MAX_MESSAGES]}
    left_out = ((key, *pair) for key, rounds in replayed.left_out.items() for pair in rounds)
    notes = [*replayed.notes, *(f"{key}: round {round} was left out: {why}" for key, round, why in left_out)]
    if len(failed) < len(replayed.failed):
        notes.insert(0, f"{len(replayed.failed)} cases failed; the first {MAX_MESSAGES} are listed")
    return ReplaySummary(
        source=replay.folder.name,
        null=replay.spec.null,
        done=replayed.done,
        skipped=replayed.skipped,
        failed=failed,
        routes=replayed.routes,
        notes=tuple(note[:MAX_MESSAGE] for note in notes[:MAX_MESSAGES]),
    )
