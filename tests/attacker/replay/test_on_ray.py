"""Tests that a replay on a Ray cluster gives the results of one process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from command_line import join_lines, run_attacker
from federations import federate

from attacker.reconstruction import Reconstruction
from defenses.registry import references

pytestmark = pytest.mark.ray

REPOSITORY = Path(__file__).parents[3]
COMMAND = [sys.executable, "-c", "from attacker.cli import main; main()", "replay"]
OPTIONS = ["--attack", "inverting_gradients", "--set", "steps=3", "--no-null", "--chunk", "2", "--device", "cpu", "--json"]


@pytest.fixture(autouse=True)
def nothing_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removal of code admitted by other tests from the environment of started processes."""
    monkeypatch.delenv(references.CODE_VARIABLE, raising=False)


def replay(run: Path, *more: str) -> tuple[dict, dict[str, Reconstruction]]:
    done = subprocess.run([*COMMAND, str(run), *OPTIONS, *more], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return read_results(done.stdout)  # stdout must be one JSON document, without output of Ray


def read_results(stdout: str) -> tuple[dict, dict[str, Reconstruction]]:
    """Return the only attack in the output of a replay, and its reconstructions by file name."""
    (result,) = json.loads(stdout)
    return result, {path.name: Reconstruction.read(path) for path in sorted(Path(result["folder"]).glob("*.safetensors"))}


def test_ray_gives_bitwise_equal_results(tmp_path: Path) -> None:
    run = federate(tmp_path / "run", rounds=2, batch_size=2)
    on_ray, theirs = replay(run, "--ray", "local", "--out", str(tmp_path / "ray"))
    result = run_attacker("replay", run, *OPTIONS, "--workers", "1", "--out", tmp_path / "here")
    here, mine = read_results(result.stdout)
    assert (on_ray["done"], on_ray["failed"]) == (here["done"], here["failed"]) == (4, {})
    assert list(mine) == list(theirs)
    for name, answer in mine.items():
        assert torch.equal(answer.x, theirs[name].x)
        assert torch.equal(answer.loss, theirs[name].loss)


def test_missing_cluster_is_an_error(tmp_path: Path) -> None:
    run = federate(tmp_path / "run", batch_size=2)
    done = subprocess.run([*COMMAND, str(run), *OPTIONS, "--ray", "127.0.0.1:1"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "no Ray cluster at '127.0.0.1:1'" in join_lines(done.stderr)
    assert "Traceback" not in done.stderr


THEIRS = """
import sys
from pathlib import Path

from their_values import GREY

from attacker.attacks import Need
from attacker.attacks.answers import build_reconstruction


class Grey:
    device = "cpu"
    needs = frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES})

    def null(self):
        return self

    def __call__(self, cases, *, rng, progress=None, memory=None):
        return [self._answer(case, rng) for case in cases]

    def _answer(self, case, rng):
        import torch

        count = case.observations[0].num_examples
        x = torch.full((count, *case.observations[0].data.shape), GREY)
        shipped = [Path(entry) for entry in sys.path if "py_modules_files" in entry]  # files that Ray has sent
        files = {path.name for folder in shipped for path in folder.glob("their_*.py")}
        route = " and ".join(sorted(files)) or "nothing"
        return build_reconstruction(case, x, torch.zeros(count, dtype=torch.int64), attack="grey", rng=rng, route=route)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Address of a cluster that was started in another folder and inherits nothing from the replay."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    (tmp_path / "elsewhere").mkdir()
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--head",
        "--block",
        "--num-cpus",
        "1",
        "--disable-usage-stats",
    ]
    command += ["--include-dashboard=false", "--port", address.rpartition(":")[2]]
    head = subprocess.Popen(
        command, cwd=tmp_path / "elsewhere", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    until = time.monotonic() + 600
    while True:
        try:
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=1).close()
            break
        except OSError:
            assert head.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
    yield address
    head.terminate()
    try:
        head.wait(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)


def test_named_code_is_sent_to_the_cluster(tmp_path: Path, cluster: str) -> None:
    run, app = federate(tmp_path / "run", batch_size=2), tmp_path / "app"
    app.mkdir()
    (app / "their_attack.py").write_text(THEIRS)
    (app / "their_values.py").write_text("GREY = 0.25\n")
    options = ["--attack", "their_attack:Grey", "--no-null", "--device", "cpu", "--json", "--ray", cluster]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run([*COMMAND, str(run), *options], cwd=app, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert (result["done"], result["routes"]) == (2, {"their_attack.py and their_values.py": 2})
    assert all(Reconstruction.read(path).x.unique().tolist() == [0.25] for path in Path(result["folder"]).glob("*.safetensors"))
