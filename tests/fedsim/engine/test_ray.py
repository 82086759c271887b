"""Ray runs the same federation as one process does, in a process of its own."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fedsim.recording import Recording
from fedsim.server.checkpoint import ServerCheckpoint, count_rounds

EXPERIMENT = """
rounds = 2
model = { name = "mlp", hidden = [4] }
data = "digits"
clients = { count = 3 }
training = { learning_rate = 0.5, batch_size = 600, epochs = 2, momentum = 0.5 }
defense = "clip(1) | gaussian(0.01)"
"""


def command(out: str, engine: str, *more: str) -> list[str]:
    program = [sys.executable, "-c", "from fedsim.cli import main; main()", "run", "e.toml", "--out", out, "--engine", engine]
    return [*program, "--device", "cpu", "--json", *more]


def federate(folder: Path, out: str, engine: str, *more: str) -> dict[str, Any]:
    done = subprocess.run(command(out, engine, *more), cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)  # one document, and nothing of Ray's or Flower's beside it
    return told


def files(run: Path, *parts: str) -> dict[str, bytes]:
    found = [path for part in parts for path in (run / part).rglob("*") if path.is_file()]
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


def test_ray_records_bit_for_bit_what_one_process_records(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    told = {engine: federate(tmp_path, engine, engine, "--client-seed", "7") for engine in ("ray", "local")}
    assert told["ray"]["complete"] == told["local"]["complete"] == 6
    assert told["ray"]["clients"] == told["local"]["clients"]
    assert [row["loss"] for row in told["ray"]["per_round"]] == [row["loss"] for row in told["local"]["per_round"]]
    ray, local = (files(tmp_path / engine, "recording/rounds", "truth", "clients") for engine in ("ray", "local"))
    identities, states = 3, 3 * 2
    assert len(ray) == 2 * (1 + 3) + (1 + 3) + identities + states + 1
    assert ray == local
    for engine in told:
        seen = list(Recording(tmp_path / engine / "recording").read_observations())
        assert len(seen) == 6
        assert {o.cohort for o in seen} == {tuple(told["ray"]["clients"])}


def test_a_federation_on_ray_that_is_killed_goes_on(tmp_path: Path) -> None:
    """To the same end, bit for bit, as one process that was left alone."""
    (tmp_path / "e.toml").write_text(EXPERIMENT.replace("rounds = 2", "rounds = 12"))
    process = subprocess.Popen(
        command("ray", "ray", "--client-seed", "7"), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while (count_rounds(tmp_path / "ray" / "state") or 0) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    before = len(list(Recording(tmp_path / "ray" / "recording").read_observations()))
    assert 9 <= before < 36
    told = federate(tmp_path, "ray", "ray", "--resume")
    federate(tmp_path, "local", "local", "--client-seed", "7")
    assert told["complete"] == 36
    parts = ("recording/rounds", "clients")
    assert files(tmp_path / "ray", *parts) == files(tmp_path / "local", *parts)
    ray, local = (ServerCheckpoint.read(tmp_path / engine / "state") for engine in ("ray", "local"))
    assert ray is not None
    assert local is not None
    assert (ray.attempt, local.attempt) == (2, 1)
    assert all(torch.equal(t, local.arrays[name]) for name, t in ray.arrays.items())
