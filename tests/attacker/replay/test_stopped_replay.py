"""A replay that is really stopped half way: what is scored then is of what it finished, and says what it did not."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from attacker.cli import app
from attacker.scoring import read_rows
from attacker.scoring.states import count_cases
from fedsim.commands.console import EXIT_UNFINISHED
from fedsim.config.experiment import validate
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun

EXPERIMENT = {
    "rounds": 3,
    "model": {"name": "mlp", "hidden": [8]},
    "data": "digits",
    "clients": {"count": 2},
    "training": {"learning_rate": 0.1, "batch_size": 1, "steps": 1},
}
SEARCH = ("--attack", "inverting_gradients", "--set", "steps=3000", "--set", "tv=0.0", "--chunk", "1")
AGIC = ("--attack", "agic", "--set", "steps=1000000")
Stop = Callable[..., int]


@pytest.fixture(scope="module")
def federated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    engine.run(FederationRun(experiment=validate(EXPERIMENT, source="test"), out=folder, client_seed=1), engine="local")
    return folder


@pytest.fixture
def run(federated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(federated, tmp_path / "run"))


def stop(run: Path, attack: tuple[str, ...], sent: signal.Signals, *, at: str) -> int:
    """Replay in a process of its own, and send it a signal when the first file like `at` is there; its exit status."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from attacker.cli import main; main()"
    words = ["replay", str(run), *attack, "--no-null", "--device", "cpu", "--workers", "1"]
    with (run / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + 240
            while not list(run.glob(f"reconstructions/*/{at}")):
                assert process.poll() is None, (run / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(sent)
            return process.wait(120)
        finally:
            process.kill()
            process.wait()


def score(run: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["score", str(run), *more])


def summary_of(run: Path) -> dict[str, Any]:
    told = score(run, "--json")
    assert told.exit_code == EXIT_UNFINISHED, told.output
    (summary,) = json.loads(told.stdout)
    return dict(summary)


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_share_is_of_the_cases_that_a_stopped_search_finished(run: Path, sent: signal.Signals, status: int) -> None:
    assert stop(run, SEARCH, sent, at="*.safetensors") == status
    summary = summary_of(run)
    cases = {state: summary["cases"].get(state, 0) for state in ("done", "failed", "interrupted", "waiting")}
    assert sum(cases.values()) == 6
    assert cases["done"] >= 1
    assert cases["waiting"] >= 1
    assert cases["failed"] == 0
    assert cases["interrupted"] <= (sent == signal.SIGINT)
    assert summary["examples"] == summary["success"]["count"] == cases["done"]
    assert count_cases(read_rows(run / "scores.jsonl")) == {state: count for state, count in cases.items() if count}
    told = score(run)
    assert f"{6 - cases['done']} of 6 cases are not finished" in " ".join(told.stderr.split())
    assert f"{cases['done']} of 6 cases" in told.stdout
    assert f"{cases['waiting']} waiting" in told.stdout
    if sent == signal.SIGINT:
        assert f"{6 - cases['done']} of 6 cases are not finished" in (run / "log").read_text()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_an_attack_on_whole_clients_that_was_stopped_has_no_share_of_nothing(run: Path, sent: signal.Signals) -> None:
    stop(run, AGIC, sent, at="*.checkpoint")
    summary = summary_of(run)
    assert (summary["cases"], summary["success"], summary["examples"]) == ({"waiting": 2}, None, 0)
    told = score(run)
    assert told.exit_code == EXIT_UNFINISHED
    assert "agic(steps=1000000): nothing finished yet." in told.stdout
    assert "0%" not in told.stdout
    assert "2 of 2 cases are not finished (2 waiting)" in " ".join(told.stderr.split())


def test_what_is_finished_leaves_no_status(run: Path) -> None:
    told = CliRunner().invoke(app, ["replay", str(run), "--attack", "exact", "--device", "cpu"])
    assert told.exit_code == 0, told.output
    assert score(run).exit_code == 0
    null = next(path for path in run.glob("reconstructions/exact-null-*/*.safetensors"))
    null.unlink()
    told = score(run)
    assert told.exit_code == EXIT_UNFINISHED
    assert "exact() without gradient: 1 of 6 cases are not finished (1 waiting)" in " ".join(told.stderr.split())


@pytest.mark.parametrize(("command", "status"), [("replay", 1), ("score", 3)])
def test_the_exit_statuses_are_told_in_the_help(command: str, status: int) -> None:
    told = CliRunner().invoke(app, [command, "--help"]).output
    assert "Exit status" in " ".join(told.split())
    assert f" {status} if" in " ".join(told.replace("│", " ").split())
