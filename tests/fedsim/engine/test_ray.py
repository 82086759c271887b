"""Test that a federation on Ray, killed and resumed, gives the same results as a federation in one process."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run_fedsim

from fedsim.recording import Recording
from fedsim.recording.files import read_json_lines
from fedsim.server.checkpoint import ServerCheckpoint, count_rounds

pytestmark = pytest.mark.ray

EXPERIMENT = """
rounds = 12
model = { name = "mlp", hidden = [4] }
data = "digits"
clients = { count = 3 }
training = { learning_rate = 0.5, batch_size = 600, epochs = 2, momentum = 0.5 }
defense = "clip(1) | gaussian(0.01)"
"""


def make_arguments(engine: str, *more: str) -> list[str]:
    return ["run", "e.toml", "--out", engine, "--engine", engine, "--device", "cpu", "--json", *more]


def make_command(*more: str) -> list[str]:
    return [sys.executable, "-c", "from fedsim.cli import main; main()", *make_arguments("ray", *more)]


def files(run: Path, *parts: str) -> dict[str, bytes]:
    found = [path for part in parts for path in (run / part).rglob("*") if path.is_file()]
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


def read_truth(run: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the rows of the last attempt at each round by client, with the attempt's number set to 0."""
    paths = (run / "truth").glob("*.jsonl")
    return {path.stem: {row["round"]: {**row, "attempt": 0} for row in read_json_lines(path)} for path in paths}


def test_a_killed_federation_on_ray_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, recording and truth equal those of an uninterrupted run in one process, bit for bit.

    Until the run is killed, one Ray process trains all clients; then there are as many processes as CPUs.
    """
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(EXPERIMENT)
    process = subprocess.Popen(
        make_command("--client-seed", "7", "--client-cpus", str(os.cpu_count() or 1)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 600
    while (count_rounds(tmp_path / "ray" / "state") or 0) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    before = len(list(Recording(tmp_path / "ray" / "recording").read_observations()))
    assert 9 <= before < 36
    done = subprocess.run(make_command("--resume"), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    on_ray = json.loads(done.stdout)  # stdout is one JSON document, without output of Ray or Flower
    here = json.loads(run_fedsim(*make_arguments("local", "--client-seed", "7")).stdout)
    assert on_ray["complete"] == here["complete"] == 36
    assert on_ray["clients"] == here["clients"]
    assert [row["loss"] for row in on_ray["per_round"]] == [row["loss"] for row in here["per_round"]]
    parts = ("recording/rounds", "clients")
    assert files(tmp_path / "ray", *parts) == files(tmp_path / "local", *parts)
    assert len(files(tmp_path / "local", "recording/rounds")) == 12 * (1 + 3)
    assert read_truth(tmp_path / "ray") == read_truth(tmp_path / "local")
    assert {o.cohort for o in Recording(tmp_path / "ray" / "recording").read_observations()} == {tuple(here["clients"])}
    ray, local = (ServerCheckpoint.read(tmp_path / engine / "state") for engine in ("ray", "local"))
    assert (ray.attempt, local.attempt) == (2, 1)
    assert all(torch.equal(t, local.arrays[name]) for name, t in ray.arrays.items())
