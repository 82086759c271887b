"""Test that secure aggregation on Ray gives the same sum as in one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run_fedsim

from fedsim.recording import Recording

pytestmark = pytest.mark.ray

EXPERIMENT = """
rounds = 1
model = { name = "mlp", hidden = [4] }
data = "digits"
clients = { count = 3 }
training = { learning_rate = 0.5, batch_size = 600, epochs = 1 }
defense = "clip(1) | gaussian(0.01)"
secure_aggregation = { threshold = 3 }
"""


def test_the_sum_on_ray_is_bit_for_bit_that_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(EXPERIMENT)
    found = []
    for engine in ("ray", "local"):
        words = ["run", "e.toml", "--out", engine, "--engine", engine, "--device", "cpu", "--json", "--client-seed", "7"]
        if engine == "ray":
            program = [sys.executable, "-c", "from fedsim.cli import main; main()"]
            done = subprocess.run([*program, *words], capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
            result = json.loads(done.stdout)
        else:
            result = json.loads(run_fedsim(*words).stdout)
        assert result["complete"] == 1
        found.append({path.name: path.read_bytes() for path in sorted((tmp_path / engine / "recording/rounds").rglob("*.*"))})
    assert len(found[0]) == 3 + 1 + 1
    assert found[0].keys() == found[1].keys()
    same = {name for name, content in found[0].items() if content == found[1][name]}
    assert len(found[0]) - len(same) == 3, "the masks come from the system, and all else repeats"
    (observation,) = Recording(tmp_path / "ray" / "recording").read_observations()
    assert len(observation.cohort) == 3
