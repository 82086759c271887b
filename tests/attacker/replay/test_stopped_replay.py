"""Tests of replays that a signal stops: scores are of the finished cases, and unfinished ones are counted."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import join_lines, run_attacker
from federations import federate
from typer.testing import Result

from attacker.scoring import read_rows
from attacker.scoring.states import count_cases
from fedsim.commands.console import EXIT_UNFINISHED

SEARCH = ("--attack", "inverting_gradients", "--set", "steps=3000", "--set", "tv=0.0", "--chunk", "1")
AGIC = ("--attack", "agic", "--set", "steps=1000000")
Stop = Callable[..., int]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate(tmp_path_factory.mktemp("runs") / "digits", rounds=3)


def stop(run: Path, attack: tuple[str, ...], sent: signal.Signals, *, at: str) -> int:
    """Run a replay in a new process, send it a signal once a file matches `at`, and return its exit status."""
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
    return run_attacker("score", run, *more)


def summary_of(run: Path) -> dict[str, Any]:
    result = score(run, "--json")
    assert result.exit_code == EXIT_UNFINISHED, result.output
    (summary,) = json.loads(result.stdout)
    return dict(summary)


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_scores_of_a_stopped_search_are_of_finished_cases(run: Path, sent: signal.Signals, status: int) -> None:
    assert stop(run, SEARCH, sent, at="*.safetensors") == status
    summary = summary_of(run)
    cases = {state: summary["cases"].get(state, 0) for state in ("done", "failed", "interrupted", "waiting")}
    assert sum(cases.values()) == 6
    assert cases["done"] >= 1
    assert cases["waiting"] >= 1
    assert cases["failed"] == 0
    assert cases["interrupted"] <= (sent == signal.SIGINT)
    assert summary["examples"] == summary["success"]["count"] == cases["done"]
    states = {row.case: row.state for row in read_rows(run / "scores.jsonl")}
    assert count_cases(states) == {state: count for state, count in cases.items() if count}
    result = score(run)
    assert f"{6 - cases['done']} of 6 cases are not finished" in join_lines(result.stderr)
    assert f"{cases['done']} of 6 cases" in result.stdout
    assert f"{cases['waiting']} waiting" in result.stdout
    if sent == signal.SIGINT:
        assert f"{6 - cases['done']} of 6 cases are not finished" in (run / "log").read_text()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_stopped_attack_without_a_finished_case_has_no_score(run: Path, sent: signal.Signals) -> None:
    stop(run, AGIC, sent, at="*.checkpoint")
    summary = summary_of(run)
    assert (summary["cases"], summary["success"], summary["examples"]) == ({"waiting": 2}, None, 0)
    result = score(run)
    assert result.exit_code == EXIT_UNFINISHED
    assert "agic(steps=1000000): nothing finished yet." in result.stdout
    assert "0%" not in result.stdout
    assert "2 of 2 cases are not finished (2 waiting)" in join_lines(result.stderr)


def test_finished_replay_has_exit_status_0_and_a_missing_null_case_not(run: Path) -> None:
    result = run_attacker("replay", run, "--attack", "exact", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert score(run).exit_code == 0
    null = next(path for path in run.glob("reconstructions/exact-null-*/*.safetensors"))
    null.unlink()
    result = score(run)
    assert result.exit_code == EXIT_UNFINISHED
    assert "exact() without gradient: 1 of 6 cases are not finished (1 waiting)" in join_lines(result.stderr)


@pytest.mark.parametrize(("command", "status"), [("replay", 1), ("score", 3)])
def test_exit_statuses_are_in_the_help(command: str, status: int) -> None:
    result = run_attacker(command, "--help").output
    assert "Exit status" in join_lines(result)
    assert f" {status} if" in " ".join(result.replace("│", " ").split())
