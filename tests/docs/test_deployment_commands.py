"""Test of the documented commands for a federation of separate processes: shell blocks that do not run with their page."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from socket import socket

import pytest
import tomli_w
from code_blocks import PAGES, PROGRAMS, ROOT, blocks
from typer.testing import CliRunner

from fedsim.config.experiment import read
from fedsim.deployment.mounts import explain_missing_isolation
from fedsim.deployment.processes import Processes, find_free_port
from fedsim.recording import Recording

HERE = str(Path(__file__).relative_to(ROOT))
MAX_SECONDS = 900
FEW_STEPS, TWO_CLIENTS = ("--set", "steps=2"), ("--set", "clients.count=2", "--set", "rounds=1")
ADDRESSES = ("192.0.2.10:8000", "superlink.example.org:8000", "10.0.0.1:8000")
"""Addresses of the SuperLink on the pages."""


def read_documented(port: int, folder: Path) -> list[str]:
    """Return the commands of the blocks that name this test, with the address and the paths of this machine, each once."""
    pages = sorted(PAGES, key=lambda page: page.name != "deployment.md")  # first, since it lists the steps in order
    found = [
        shlex.join(words) for page in pages for block in blocks(page) if block.elsewhere == HERE for words in block.commands()
    ]
    for old in ADDRESSES:
        found = [command.replace(old, f"127.0.0.1:{port}") for command in found]
    found = [command.replace("0.0.0.0", "127.0.0.1").replace("$PWD", str(folder)) for command in found]
    return list(dict.fromkeys(found))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path / "logs") as running:
        yield running


def call(words: list[str], folder: Path) -> tuple[int, str]:
    """Run a command in this process, where its modules are loaded already. Return its exit status and output."""
    with contextlib.chdir(folder):
        done = CliRunner().invoke(PROGRAMS[words[0]], words[1:])
    return done.exit_code, done.output


@pytest.mark.deploy
def test_the_documented_commands_lead_from_keys_to_scores(processes: Processes, tmp_path: Path) -> None:
    port, folder = find_free_port(), tmp_path / "site"
    folder.mkdir()
    path = folder / "two-clients.toml"
    changes = [("clients.count", 2), ("rounds", 1)]
    path.write_text(read(ROOT / "deploy" / "experiments" / "photos.toml", changes).to_toml())
    assert call(["fedsim", "prepare", str(path), "--out", "federation"], folder)[0] == 0
    for command in read_documented(port, folder):
        words = shlex.split(command)
        if is_for_one_machine(words):
            continue
        if words[:2] == ["fedsim", "start"]:
            processes.start(words[2], words, cwd=folder)
            continue
        if words[:2] == ["fedsim", "enrol"]:  # a person waits until the SuperLink says that it runs
            processes.wait_for("superlink", lambda: is_listening(port), timeout=MAX_SECONDS)
        if words[0] == "flwr":
            run_with_flower(words, folder, path, port)
            continue
        if words[:2] == ["attacker", "serve"]:
            ask_service(processes, words, folder)
            continue
        status, output = call([*words, *(FEW_STEPS if words[1] == "replay" else ())], folder)
        assert status == 0, f"{command}\n{output}"
    for run in (folder / "federation" / "server" / "federation", folder / "flwr"):
        assert [row.status for row in Recording(run / "recording").read_rows()] == ["complete", "complete"], run
    assert (folder / "federation" / "scores" / "federation" / "scores.jsonl").exists()


def run_with_flower(words: list[str], folder: Path, experiment: Path, port: int) -> None:
    """Run a command `flwr run` on the SuperLink, in a Flower home of its own, with the paths of this test."""
    home = folder / "home"
    home.mkdir()
    link = {"address": f"127.0.0.1:{port}", "root-certificates": str(folder / "federation" / "trust" / "ca.crt")}
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": "SUPERLINK", "SUPERLINK": link}}))
    paths = {"deploy/experiments/photos.toml": experiment, "/srv/run": folder / "flwr", "/srv/federation": folder / "federation"}
    for old, new in paths.items():
        words = [word.replace(old, str(new)) for word in words]
    environment = {**os.environ, "FLWR_HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=MAX_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


def is_for_one_machine(words: list[str]) -> bool:
    """Return whether a command starts all parties itself, so that none has to run before."""
    return words[0] == "deploy/native" or (words[:2] == ["fedsim", "run"] and "--superlink" not in words)


@pytest.mark.deploy
def test_the_documented_commands_run_a_federation_on_one_machine(tmp_path: Path) -> None:
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    commands = [words for words in map(shlex.split, read_documented(0, tmp_path)) if is_for_one_machine(words)]
    assert [words[0] for words in commands] == ["fedsim", "deploy/native"]
    run, native = commands
    assert call([*run, *TWO_CLIENTS], tmp_path)[0] == 0
    native += [*TWO_CLIENTS, *(["--open"] if explain_missing_isolation() else [])]
    assert subprocess.run([sys.executable, *native], cwd=tmp_path, timeout=MAX_SECONDS).returncode == 0
    for recording in (tmp_path / "runs/deployed/recording", tmp_path / "runs/native/server/federation/recording"):
        assert [row.status for row in Recording(recording).read_rows()] == ["complete"] * 2


def is_listening(port: int) -> bool:
    with socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def ask_service(processes: Processes, words: list[str], folder: Path) -> None:
    """Start the service, ask it for its page, and end it as Ctrl-C does."""
    processes.start("serve", [*words, "--port", "0"], cwd=folder)
    processes.wait_for("serve", lambda: bool(find_address(processes)), timeout=MAX_SECONDS)
    with urllib.request.urlopen(find_address(processes), timeout=60) as page:
        assert page.status == 200
    processes.end("serve", signal.SIGINT)


def find_address(processes: Processes) -> str:
    """Return the address that the service has printed, or an empty text if it has printed none yet."""
    lines = processes.find_log("serve").read_text().splitlines()
    return next((line for line in lines if line.startswith("http")), "")
