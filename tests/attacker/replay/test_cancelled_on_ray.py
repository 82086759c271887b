"""Tests that no task goes on running on a Ray cluster after Ctrl-C or an error, wherever in the replay it comes."""

import subprocess
import sys
from pathlib import Path

import pytest
from federations import federate

pytestmark = pytest.mark.ray

PROGRAM = """
import sys
from pathlib import Path

import ray

from attacker.attacks import AttackSpec
from attacker.replay.executors import ray_cluster
from attacker.replay.replay import Replay, ReplayResult
from attacker.replay.tasks import TaskOutcome
from fedsim.recording import Recording

folder = Path(sys.argv[1])
recording = Recording(folder / "run" / "recording")
endless = recording.read_rows()[1].key
spec = AttackSpec(name="inverting_gradients", arguments={"steps": 1})
write_bytes, add = ray_cluster.write_bytes, ReplayResult.add
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
for place in sys.argv[2:]:
    begun, cancelled = folder / f"{place} begun", folder / f"{place} cancelled"

    def work(job, task, fingerprint, parcel):
        import time

        try:
            if endless in task.keys:
                begun.touch()
            while endless in task.keys or not begun.exists():
                time.sleep(0.05)
        except KeyboardInterrupt:
            cancelled.touch()
            raise
        return TaskOutcome(), {"first.failed.json": b"{}"}

    def fail(*_, **__):
        raise OSError("full") if place == "files" else KeyboardInterrupt

    ray_cluster.run_remote_task = work
    ray_cluster.write_bytes = fail if place == "files" else write_bytes
    ReplayResult.add = fail if place == "outcome" else add
    replay = Replay(recording=recording, spec=spec, out=folder / place, chunk=1, ray="local")
    try:
        replay.run(fail if place == "progress" else None)
    except (KeyboardInterrupt, OSError) as error:
        print(place, type(error).__name__, cancelled.exists())
"""
"""Replays on a running cluster of two tasks: one ends once the other one has begun, and this one only if it is cancelled."""


def test_tasks_are_cancelled_wherever_the_replay_ends(tmp_path: Path) -> None:
    """It ends while it is told of progress, while an outcome is counted, or while files that a worker sent are written."""
    federate(tmp_path / "run")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "progress", "outcome", "files"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = ["progress KeyboardInterrupt True", "outcome KeyboardInterrupt True", "files OSError True"]
    assert done.stdout.splitlines() == lines, done.stderr
