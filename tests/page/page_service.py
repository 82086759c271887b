"""Helpers that start `attacker serve` on a folder of runs, and that send requests to it directly."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import wait_until

COMMANDS = Path(sys.executable).parent
START = 240.0
EXPERIMENT = """
seed = 0
rounds = 2
model = "lenet_cpl"
data = { name = "photos", size = 32 }
partition = { name = "dirichlet", alpha = 0.5 }
clients = { count = 3 }
training = { learning_rate = 0.01, batch_size = 1, steps = 1 }
"""


@contextmanager
def serving(root: Path, *options: str, port: int | None = None) -> Iterator[str]:
    """Run `attacker serve` within the context, without a token unless --token is given; yields its address once it answers."""
    port = port or free_port()
    options = options if "--token" in options else ("--no-token", *options)
    arguments = [str(COMMANDS / "attacker"), "serve", str(root), "--port", str(port), *options]
    with (root.parent / f"serve-{port}.log").open("ab") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, env=environment())
    try:
        address = f"http://127.0.0.1:{port}/"
        wait_until(lambda: answers(address, process), seconds=START)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(address: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "attacker serve ended before it answered"
    try:
        return bool(asked(address, "health")["status"] == "ok")
    except (urllib.error.URLError, ConnectionError):
        return False


def asked(address: str, path: str) -> Any:
    """Return the service's JSON response to a request that does not come from the page."""
    with urllib.request.urlopen(f"{address}api/v1/{path}", timeout=10) as answer:
        return json.load(answer)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(name: str, *arguments: Any) -> None:
    subprocess.run([COMMANDS / name, *map(str, arguments)], check=True, env=environment(), capture_output=True, timeout=120)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
