"""A deployment of processes on this machine, and how patient to be with it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in what they start in the background, for all below

EXPERIMENT = """
rounds = {rounds}
timeout = {timeout}
model = {{ name = "mlp", hidden = [16] }}
data = "digits"
clients = {{ count = {clients} }}
training = {{ learning_rate = 0.1, batch_size = 1, steps = 1 }}
"""


@pytest.fixture(scope="session")
def slowness() -> float:
    """Seconds until a client's process has loaded, some four on an idle core: what times out follows from it."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import fedsim.engine.flower_app"], check=True)
    return time.monotonic() - started


@pytest.fixture(scope="session")
def write_experiment() -> "type[Writer]":
    return Writer


class Writer:
    """Writes the experiment of these tests."""

    @staticmethod
    def write(folder: Path, *, rounds: int, clients: int, timeout: float = 300) -> Path:
        path = folder / "e.toml"
        path.write_text(EXPERIMENT.format(rounds=rounds, clients=clients, timeout=timeout))
        return path
