"""Tests of a deployment with TLS and keys on this machine that loses a client and the SuperLink, is attacked and scored."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.commands.maintenance import verify
from fedsim.config.experiment import read
from fedsim.deployment import commands
from fedsim.deployment.certificates import make_client
from fedsim.deployment.folders import Layout, prepare
from fedsim.deployment.mounts import Mount, explain_missing_isolation, make_isolation_prefix
from fedsim.deployment.native import NativeDeployment, list_parties
from fedsim.deployment.processes import RUNNER_NAME, find_free_port
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording
from fedsim.recording.files import read_json_lines

pytestmark = pytest.mark.deploy
CLIENTS, SEED = 2, 7
MOST_SECONDS = 1500
"""Time limit of a run on a machine with one slow core."""
needs_isolation = pytest.mark.skipif(explain_missing_isolation() != "", reason=explain_missing_isolation())


@dataclass
class DeployedRun:
    """A finished deployment. seen: files below the deployment's folder, by party, as the party's process sees them."""

    layout: Layout
    seen: dict[str, list[str]] = field(default_factory=dict)
    status: int | None = None
    lost: list[str] = field(default_factory=list)
    impostor: tuple[int, str] = (0, "")
    refused: tuple[int, str] = (0, "")


def below(native: NativeDeployment, party: str) -> list[str]:
    """List files and folders, two levels deep, as the party's process sees them."""
    root = native.layout.root
    there = Path(f"/proc/{native.processes._running[party].pid}/root") / root.relative_to("/")
    return sorted(str(path.relative_to(there)) for path in [*there.glob("*"), *there.glob("*/*")])


def start_impostor(native: NativeDeployment, deployed: DeployedRun) -> None:
    """Start a client with a key that was never enrolled, and keep its exit status and its log."""
    folder = native.layout.root / "impostor"
    make_client(folder / "key", folder / "key.pub")
    config = native.layout.make_client_config(0, CLIENTS)
    command = commands.make_client_command(native.link, key=str(folder / "key"), port=find_free_port(), config=config)
    native.processes.start("impostor", [*command, "--max-retries", "1"], cwd=folder)
    status = native.processes.wait("impostor", 300)
    deployed.impostor = status, native.processes.find_log("impostor").read_text()
    native.processes.end("impostor")


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, write_experiment: Any, restart_client: Any) -> DeployedRun:
    folder = tmp_path_factory.mktemp("deployed")
    experiment = read(write_experiment.write(folder, rounds=2, clients=CLIENTS))
    layout = prepare(experiment, folder / "federation")
    found_run = DeployedRun(layout)
    native = NativeDeployment(layout, list_parties(layout, CLIENTS, seed=SEED), isolated=explain_missing_isolation() == "")

    lost: list[str] = []
    deadline = time.monotonic() + MOST_SECONDS

    def kill_and_restart() -> None:
        """Kill and restart a client when the first round has begun, and the SuperLink when the second has."""
        assert time.monotonic() < deadline, "the run hangs"
        begun = len(read_json_lines(layout.run / "metrics.jsonl"))
        if begun == 1 and not lost:
            lost.append("client-1")
            native.processes.end("client-1", signal.SIGKILL)
            restart_client(native, 1)
        if begun == 2 and "superlink" not in lost:
            lost.append("superlink")
            native.processes.end("superlink", signal.SIGKILL)
            native.start_superlink()

    with native:
        start_impostor(native, found_run)
        found_run.seen = {party: below(native, party) for party in ("superlink", "server", "client-0")}
        found_run.status = native.run(kill_and_restart)
        found_run.lost = lost
        native.processes.end(RUNNER_NAME)
        agreed = layout.experiment.read_text()
        layout.experiment.write_text(agreed.replace("rounds = 2", "rounds = 3"))
        found_run.refused = native.run(), native.processes.find_log(RUNNER_NAME).read_text()
        layout.experiment.write_text(agreed)
    return found_run


def test_the_run_completes_despite_the_loss_of_the_superlink_and_of_a_client(deployed: DeployedRun) -> None:
    rows = Recording(deployed.layout.run / "recording").read_rows()
    assert deployed.lost == ["client-1", "superlink"]
    assert deployed.status == int(any(row.status != "complete" for row in rows))
    assert [row.round for row in rows] == [1, 1, 2, 2]
    for number in (1, 2):
        assert len({row.client for row in rows if row.round == number}) == CLIENTS
        lost = [row.status for row in rows if row.round == number and row.status != "complete"]
        assert lost in ([], ["late"], ["failed"])  # a message on its way when the client, or the SuperLink, was killed is lost
    assert len({row.node for row in rows}) == CLIENTS  # a restarted client is recognised by its key


def test_the_recording_is_undamaged_and_bit_for_bit_that_of_a_simulation(deployed: DeployedRun, tmp_path: Path) -> None:
    found = verify(deployed.layout.run)
    assert found.damaged == ()
    assert found.intact == found.observations >= 2
    experiment = read(deployed.layout.experiment)
    simulated = FederationRun(experiment=experiment, out=tmp_path / "run", device="cpu", client_seed=SEED)
    engine.run(simulated, engine="local")
    expected = {(o.round, o.client): o for o in Recording(tmp_path / "run" / "recording").read_observations()}
    seen = list(Recording(deployed.layout.run / "recording").read_observations())
    whole = sum(o.round == 1 for o in seen) == CLIENTS
    for o in (o for o in seen if o.round == 1 or whole):  # if a reply is missing, the mean is another, and so is round 2
        assert all(torch.equal(t, expected[o.round, o.client].update[name]) for name, t in o.update.items())


def test_a_client_with_a_key_that_nobody_enrolled_is_refused(deployed: DeployedRun) -> None:
    status, words = deployed.impostor
    assert status == 1
    assert "305" in words


def test_a_run_that_fails_on_the_server_fails_at_the_runner_with_the_reason(deployed: DeployedRun) -> None:
    status, words = deployed.refused
    assert status == 1
    assert "holds another run, or other files; choose another --out" in " ".join(words.split())


@needs_isolation
def test_each_party_sees_its_own_folders_and_no_other(deployed: DeployedRun) -> None:
    both = {"attacks", "attacks/federation", "clients", "flower", "public", "secret", "server", "superlink", "trust"}
    assert {name for name in deployed.seen["client-0"] if "/" not in name} == {"clients", "flower", "public", "trust"}
    assert [name for name in deployed.seen["client-0"] if name.startswith("clients/")] == ["clients/0"]
    for party in ("superlink", "server"):
        assert not any(name.startswith(("clients", "scores", "authority", "keys")) for name in deployed.seen[party]), party
        assert any(name.startswith(("superlink", "server")) for name in deployed.seen[party])
    assert {name.split("/")[0] for names in deployed.seen.values() for name in names} <= both


SEEN = {
    "attacker": [Mount("attacks", True), Mount("attacks/federation/recording")],
    "scorer": [Mount("scores", True), Mount("attacks/federation/reconstructions")]
    + [Mount(f"clients/{number}/{name}") for number in range(CLIENTS) for name in ("data", "truth")],
}
"""Folders that the attacker and the scorer see, as in docker-compose.yml."""


def call(layout: Layout, party: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command as a party would, which sees only its own folders if this system can isolate processes."""
    prefix = make_isolation_prefix(layout.root, SEEN[party]) if not explain_missing_isolation() else ()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run([*prefix, *command], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300)


def test_the_attacker_recovers_the_examples_without_truth_as_the_scorer_confirms(deployed: DeployedRun) -> None:
    layout = deployed.layout
    attacked = call(layout, "attacker", ["attacker", "replay", str(layout.attacked), "--attack", "exact", "--workers", "1"])
    assert attacked.returncode == 0, attacked.stderr
    scored = call(
        layout, "scorer", [*commands.make_scorer_command(run=str(layout.scored), truth=layout.list_truths(CLIENTS)), "--json"]
    )
    assert scored.returncode == 0, scored.stderr
    (summary,) = json.loads(scored.stdout)
    assert summary["examples"] == sum(row.status == "complete" for row in Recording(layout.run / "recording").read_rows())
    assert summary["success"]["value"] == 1
    assert not (layout.attacked / "scores.jsonl").exists()  # the attacker never gets scores
    if not explain_missing_isolation():
        without_truth = call(
            layout, "attacker", commands.make_scorer_command(run=str(layout.attacked), truth=layout.list_truths(CLIENTS))
        )
        assert without_truth.returncode == 2
        assert "holds no truth" in " ".join(without_truth.stderr.split())
