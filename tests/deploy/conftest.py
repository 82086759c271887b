"""The experiment of the deployment tests, and a measurement of how slow this machine is."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsim.deployment.native import START_SECONDS, NativeDeployment

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background jobs ignore SIGINT, and so would all child processes

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
    """Seconds until a client's process has imported its modules, about four on an idle core; timeouts are multiples of it."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import fedsim.engine.flower_app"], check=True)
    return time.monotonic() - started


@pytest.fixture(scope="session")
def write_experiment() -> "type[Writer]":
    return Writer


class Writer:
    """A writer of the experiment of these tests; the fixture `write_experiment` passes it to them."""

    @staticmethod
    def write(folder: Path, *, rounds: int, clients: int, timeout: float = 300) -> Path:
        path = folder / "e.toml"
        path.write_text(EXPERIMENT.format(rounds=rounds, clients=clients, timeout=timeout))
        return path


@pytest.fixture(scope="session")
def restart_client() -> Callable[[NativeDeployment, int], None]:
    return start_again


def start_again(native: NativeDeployment, number: int) -> None:
    """Start a client that was killed, and wait until the SuperLink accepts it.

    The SuperLink refuses the client's key for about a minute, until it notices that the old connection is lost; the client's
    process then exits and is started again.
    """
    name, deadline = f"client-{number}", time.monotonic() + 2 * START_SECONDS

    def count_joins() -> int:
        return native.processes.find_log(name).read_text(errors="replace").count("SuperNode ID:")

    before = count_joins()
    while True:
        native.start_client(native.parties[number])
        while native.processes.find_status(name) is None:
            if count_joins() > before:
                return
            assert time.monotonic() < deadline, native.processes.read_last_lines(name)
            time.sleep(0.2)
        assert time.monotonic() < deadline, native.processes.read_last_lines(name)
        time.sleep(3)
