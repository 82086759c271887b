"""Ray runs the same federation as one process does, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fedsim.wire import Recording

EXPERIMENT = """
rounds = 2
model = { name = "mlp", hidden = [4] }
data = "digits"
clients = { count = 3 }
training = { learning_rate = 0.5, batch_size = 600, epochs = 2, momentum = 0.5 }
defense = "clip(1) | gaussian(0.01)"
"""


def federate(folder: Path, engine: str) -> dict[str, Any]:
    program = [sys.executable, "-c", "from fedsim.cli import main; main()", "run", "e.toml", "--out", engine, "--engine", engine]
    done = subprocess.run(
        [*program, "--client-seed", "7", "--device", "cpu", "--json"], cwd=folder, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)  # one document, and nothing of Ray's or Flower's beside it
    return told


def test_ray_records_bit_for_bit_what_one_process_records(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    told = {engine: federate(tmp_path, engine) for engine in ("ray", "local")}
    assert told["ray"]["complete"] == told["local"]["complete"] == 6
    assert told["ray"]["clients"] == told["local"]["clients"]
    assert [row["loss"] for row in told["ray"]["per_round"]] == [row["loss"] for row in told["local"]["per_round"]]

    def files(engine: str) -> dict[str, bytes]:
        return {
            str(path.relative_to(tmp_path / engine)): path.read_bytes()
            for part in ("recording/rounds", "truth", "clients")
            for path in (tmp_path / engine / part).rglob("*")
            if path.is_file()
        }

    ray, local = files("ray"), files("local")
    assert len(ray) == 2 * (1 + 3) + (1 + 3) + 3
    assert ray == local
    for engine in told:
        assert len(list(Recording(tmp_path / engine / "recording").observations())) == 6
        assert {row.cohort for row in Recording(tmp_path / engine / "recording").rows()} == {tuple(told["ray"]["clients"])}
