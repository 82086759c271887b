"""Test of a federation on several hosts, which are network namespaces; one of them is disconnected for a round."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedsim.commands.maintenance import verify
from fedsim.config.experiment import read
from fedsim.deployment.folders import prepare
from fedsim.deployment.native import NativeDeployment, list_parties
from fedsim.recording import Recording
from fedsim.recording.files import read_json_lines

pytestmark = pytest.mark.deploy
NAMES = ("server", "client-0", "client-1")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def host(name: str) -> str:
    return f"fl{os.getpid()}-{name}"


@pytest.fixture
def network() -> Iterator[None]:
    """Network namespaces for the hosts in NAMES at 10.77.0.1 and so on, joined by a bridge in another namespace."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making network namespaces takes root, and the program ip (iproute2)")
    made = []
    try:
        for name in ("bridge", *NAMES):
            ip("netns", "add", host(name))
            made.append(name)
            ip("-n", host(name), "link", "set", "lo", "up")
        ip("-n", host("bridge"), "link", "add", "br0", "type", "bridge")
        ip("-n", host("bridge"), "link", "set", "br0", "up")
        for number, name in enumerate(NAMES, start=1):
            ip("-n", host("bridge"), "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", host(name))
            ip("-n", host("bridge"), "link", "set", f"v{number}", "master", "br0", "up")
            ip("-n", host(name), "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", host(name), "link", "set", "eth0", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        remove(made)
        pytest.skip(f"this system makes no network namespaces: {getattr(error, 'stderr', error)}")
    yield
    remove(made)


def remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", host(name)], check=False, capture_output=True)


def on_its_host(party: str) -> Sequence[str]:
    return ("ip", "netns", "exec", host(party if party.startswith("client-") else "server"))


class OnHosts(NativeDeployment):
    """A deployment whose parties run in the network namespaces; the SuperLink and the server share the first one."""

    bind, address = "0.0.0.0", "10.77.0.1"

    def make_prefix(self, party: str) -> tuple[str, ...]:
        return (*on_its_host(party), *super().make_prefix(party))

    def is_answering(self) -> bool:
        check = [sys.executable, "-m", "fedsim.deployment.health", self.link.address]
        return subprocess.run([*on_its_host("server"), *check]).returncode == 0


@pytest.mark.usefixtures("network")
def test_a_host_that_is_cut_off_for_a_round_is_missing_in_that_round_only(
    tmp_path: Path, slowness: float, write_experiment: Any
) -> None:
    timeout = min(300.0, max(90.0, 9 * slowness))  # also how long the third round waits for the host that was cut off
    deadline = time.monotonic() + 10 * timeout
    experiment = read(write_experiment.write(tmp_path, rounds=3, clients=2, timeout=timeout))
    layout = prepare(experiment, tmp_path / "federation", hosts=["10.77.0.1"])
    native = OnHosts(layout, list_parties(layout, 2), secure=False)

    def cut_off_for_the_second_round() -> None:
        assert time.monotonic() < deadline, "the run hangs"
        done = len(read_json_lines(layout.run / "metrics.jsonl")) - 1
        ip("-n", host("client-1"), "link", "set", "eth0", "down" if done == 1 else "up")

    with native:
        status = native.run(cut_off_for_the_second_round)
    assert status == 1  # a client is missing in a round
    names = {read_pseudonym(layout.make_client_path(number)): number for number in (0, 1)}
    found = {(row.round, names[row.client]): row.status for row in Recording(layout.run / "recording").read_rows()}
    assert {number: found[number, 0] for number in (1, 2, 3)} == {1: "complete", 2: "complete", 3: "complete"}
    assert (found[1, 1], found[3, 1]) == ("complete", "complete")
    assert found[2, 1] in ("failed", "late")  # failed if the SuperLink noticed the loss before the round's time was over
    whole = verify(layout.run)
    assert (whole.damaged, whole.intact, whole.observations) == ((), 5, 5)
    metrics = read_json_lines(layout.run / "metrics.jsonl")
    assert [row["missing"] for row in metrics[1:]] == [0, 1, 0]


def read_pseudonym(home: Path) -> str:
    """Read the pseudonym that a client drew."""
    (path,) = home.rglob("identity.json")
    return str(json.loads(path.read_text())["pseudonym"])
