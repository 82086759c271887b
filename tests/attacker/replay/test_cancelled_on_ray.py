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
from fedsim.recording import Recording

folder, place = Path(sys.argv[1]), sys.argv[2]
recording = Recording(folder / "run" / "recording")
endless, begun, cancelled = recording.read_rows()[1].key, folder / "begun", folder / "cancelled"


def work(job, task, fingerprint, parcel):
    import time

    try:
        if endless in task:
            begun.touch()
        while endless in task or not begun.exists():
            time.sleep(0.05)
    except KeyboardInterrupt:
        cancelled.touch()
        raise
    return {}, {"first.failed.json": b"{}"}


def fail(*_, **__):
    raise OSError("full") if place == "files" else KeyboardInterrupt


ray_cluster.run_remote_task = work
if place == "files":
    ray_cluster.write_bytes = fail
if place == "outcome":
    ReplayResult.add = fail
spec = AttackSpec(name="inverting_gradients", arguments={"steps": 1})
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
try:
    Replay(recording=recording, spec=spec, out=folder / "out", chunk=1, ray="local").run(fail if place == "progress" else None)
except (KeyboardInterrupt, OSError) as error:
    print(type(error).__name__, cancelled.exists())
"""
"""A replay on a running cluster of two tasks: one ends once the other one has begun, and this one only if it is cancelled."""


@pytest.mark.parametrize(
    ("place", "error"), [("progress", "KeyboardInterrupt"), ("outcome", "KeyboardInterrupt"), ("files", "OSError")]
)
def test_tasks_are_cancelled_wherever_the_replay_ends(place: str, error: str, tmp_path: Path) -> None:
    """It ends while it is told of progress, while an outcome is counted, or while files that a worker sent are written."""
    federate(tmp_path / "run")
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), place], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == [error, "True"], done.stderr
