"""Program of a replay's worker process. The first line of stdin is the job (the settings), every other line one task."""

from dataclasses import asdict
from typing import Any

from attacker.replay.executors.worker_loop import Throttle, Work, WorkerChannel, serve

PROGRESS_SECONDS = 0.2
"""Seconds between two progress messages of one task."""


def main() -> None:
    serve(prepare_work)


def prepare_work(channel: WorkerChannel) -> Work:
    """Read the job from the channel, load recording and attack, and return the function that runs one task."""
    from attacker.replay.task_runner import TaskRunner
    from attacker.replay.tasks import ReplayJob, Task, TaskOutcome

    bench = TaskRunner(ReplayJob.from_json(channel.read()))

    def run_task(line: str) -> dict[str, Any]:
        task, is_due = Task.from_json(line), Throttle(PROGRESS_SECONDS)

        def report_progress(done: int, total: int, message: str) -> None:
            channel.interrupt.raise_again()
            if is_due():
                channel.send_message(progress=[done, total, message])

        try:
            with channel.interrupt:
                outcome = bench.run(task, report_progress)
        except KeyboardInterrupt:  # before the attack began, or after it ended
            outcome = TaskOutcome(interrupted=True)
        return {"outcome": asdict(outcome)}

    return run_task
