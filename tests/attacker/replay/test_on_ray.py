"""A Ray cluster does the same work as one process, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from attacker.reconstruction import Reconstruction
from fedsim.config.experiment import validate
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun

EXPERIMENT = {
    "rounds": 2,
    "model": {"name": "mlp", "hidden": [8]},
    "data": "digits",
    "clients": {"count": 2},
    "training": {"learning_rate": 0.1, "batch_size": 2, "steps": 1},
}
COMMAND = [sys.executable, "-c", "from attacker.cli import main; main()", "replay"]
OPTIONS = ["--attack", "inverting_gradients", "--set", "steps=3", "--no-null", "--chunk", "2", "--device", "cpu", "--json"]


def replay(run: Path, *more: str) -> tuple[dict, dict[str, Reconstruction]]:
    done = subprocess.run([*COMMAND, str(run), *OPTIONS, *more], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)  # one document, and nothing of Ray's beside it
    return told, {path.name: Reconstruction.read(path) for path in sorted(Path(told["folder"]).glob("*.safetensors"))}


def test_ray_finds_bit_for_bit_what_one_process_finds(tmp_path: Path) -> None:
    run = tmp_path / "run"
    engine.run(FederationRun(experiment=validate(EXPERIMENT, source="test"), out=run, client_seed=1), engine="local")
    on_ray, theirs = replay(run, "--ray", "local", "--out", str(tmp_path / "ray"))
    here, mine = replay(run, "--workers", "1", "--out", str(tmp_path / "here"))
    assert (on_ray["done"], on_ray["failed"]) == (here["done"], here["failed"]) == (4, {})
    assert list(mine) == list(theirs)
    for name, answer in mine.items():
        assert torch.equal(answer.x, theirs[name].x)
        assert torch.equal(answer.loss, theirs[name].loss)


def test_a_cluster_that_is_not_there_is_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    engine.run(
        FederationRun(experiment=validate({**EXPERIMENT, "rounds": 1}, source="test"), out=run, client_seed=1), engine="local"
    )
    done = subprocess.run([*COMMAND, str(run), *OPTIONS, "--ray", "127.0.0.1:1"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "no Ray cluster at '127.0.0.1:1'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
