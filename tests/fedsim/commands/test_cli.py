"""Tests of the command line: results on stdout, all else on stderr, status 2 for wrong usage and 1 for work that failed."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_runs import SMALL, run
from command_line import join_lines, run_fedsim

from fedsim.commands.console import EXIT_FAILURES
from fedsim.config.experiment import read


def test_run_prints_one_json_document_on_stdout_and_nothing_else(small: Path) -> None:
    """The command runs in a separate process, so that the test sees everything that Flower prints."""
    call = [sys.executable, "-c", "from fedsim.cli import main; main()", "run", "small.toml", "--engine", "local", "--json"]
    done = subprocess.run([*call, "--out", "out"], capture_output=True, text=True, timeout=120, cwd=small.parent)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["run"], result["rounds"], result["complete"], len(result["clients"])) == ("out", 2, 6, 3)
    assert [row["complete"] for row in result["per_round"]] == [3, 3]
    assert "3 clients, 2 rounds; writes up to" in join_lines(done.stderr)
    assert "Traceback" not in done.stderr
    assert "INFO" not in done.stderr


def test_without_json_the_result_is_a_line_for_people(small: Path) -> None:
    result = run()
    assert result.exit_code == 0
    assert "6 observations of 3 clients in 2 rounds" in join_lines(result.stdout)


def test_running_again_skips_what_is_done(small: Path) -> None:
    first, before = run("--json"), {p: p.stat().st_mtime_ns for p in small.parent.rglob("*") if p.is_file()}
    again = run("--json")
    assert (first.exit_code, again.exit_code) == (0, 0)
    assert "out is done already" in again.stderr
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert {p: p.stat().st_mtime_ns for p in small.parent.rglob("*") if p.is_file()} == before
    resolved = run_fedsim("run", "out/experiment.toml", "--out", "out", "--engine", "local")
    assert (resolved.exit_code, "done already" in resolved.stderr) == (0, True)


def test_another_experiment_in_the_same_folder_is_refused(small: Path) -> None:
    assert run().exit_code == 0
    refused = run("--set", "seed=1")
    assert refused.exit_code == 2
    assert "out holds another run, or other files" in join_lines(refused.stderr)
    assert refused.stdout == ""


def test_print_config_prints_what_would_run_and_runs_nothing(small: Path) -> None:
    result = run("--print-config", "--set", "training.learning_rate=0.25", "--set", "defense=clip(1) | gaussian(0.1)")
    assert result.exit_code == 0
    (small.parent / "printed.toml").write_text(result.stdout)
    printed = read(small.parent / "printed.toml")
    assert (printed.training.learning_rate, printed.defense, printed.rounds) == (0.25, "clip(1) | gaussian(0.1)", 2)
    assert not (small.parent / "out").exists()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["record.rounds=1"], lambda e: e.record.rounds == "1"),
        (["data=photos", "data.size=64"], lambda e: (e.data.name, e.data.arguments) == ("photos", {"size": 64})),
        (['partition={ name = "dirichlet", alpha = 2 }'], lambda e: e.partition.arguments == {"alpha": 2}),
        (["defense="], lambda e: e.defense == ""),
        (["data=npz:a=b.npz"], lambda e: e.data.name == "npz:a=b.npz"),
    ],
)
def test_set_reads_values_as_toml_and_else_as_text(small: Path, given: list[str], found: Callable[[Any], bool]) -> None:
    result = run("--print-config", *(part for text in given for part in ("--set", text)))
    assert result.exit_code == 0, result.stderr
    (small.parent / "printed.toml").write_text(result.stdout)
    assert found(read(small.parent / "printed.toml"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "sede=1"], "override: sede: unknown key"),
        (["--set", "rounds"], "--set rounds: write it as KEY=VALUE"),
        (["--set", "=1"], "--set =1: write it as KEY=VALUE"),
        (["--set", "defense=clip(0)"], "override: defense = 'clip(0)': clip: max_norm must be positive"),
        (["--set", "strategy.central.kind=[]"], "strategy.central.kind must be one of fixed, adaptive, got []"),
        (["--set", "model=lenet_cpl", "--set", "data=breast_cancer"], "use the model 'mlp'"),
        (["--set", "model.hidden=3"], "whole numbers above 0, got 3"),
        (["--set", "data=npz:nowhere.npz"], "nowhere.npz does not exist"),
        (["--engine", "dask"], "--engine 'dask' is unknown. Known: ray, local"),
        (["--device", "abacus"], "device 'abacus' is not available on this machine"),
        (["--threads", "0"], "--threads"),
        (["--frobnicate"], "--frobnicate"),
        (["--out", "small.toml"], "small.toml"),
    ],
)
def test_wrong_usage_is_status_2_with_the_reason_on_stderr(small: Path, arguments: list[str], expected: str) -> None:
    refused = run(*arguments)
    assert refused.exit_code == 2, refused.output
    assert expected in join_lines(refused.stderr)
    assert refused.stdout == ""
    assert not (small.parent / "out").exists()


def test_an_unknown_key_in_the_file_is_named_with_the_file(small: Path) -> None:
    small.write_text(SMALL + "\n[record]\nrouns = 1\n")
    refused = run()
    assert refused.exit_code == 2
    assert "small.toml: record.rouns: unknown key" in join_lines(refused.stderr)
    assert run_fedsim("run", "none.toml").exit_code == 2


def test_work_that_fails_is_status_1(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> object:
        raise OSError("sensor unplugged")

    monkeypatch.setattr("fedsim.client.app.train", broken)
    failed = run("--json")
    assert failed.exit_code == 1
    assert failed.stdout == ""
    first = r"6 of 6 replies are missing, the first, of client \d+ in round 1: OSError: sensor unplugged"
    assert re.search(first, join_lines(failed.stderr))
    assert "no client ever answered" in join_lines(failed.stderr)
    assert "correct the cause, then fedsim delete" in join_lines(failed.stderr)
    for again in ((), ("--resume",)):  # a finished run without any answer is still a failure
        result = run("--json", *again)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "no client ever answered: 6 of 6 replies are missing" in join_lines(result.stderr)
        assert "is done already" not in join_lines(result.stderr)


def test_missing_replies_have_their_own_status_unless_failures_are_allowed(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fedsim.client.app as client_side

    real, calls = client_side.train, []

    def sometimes(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("[bold]full")
        return real(*arguments, **named)

    monkeypatch.setattr(client_side, "train", sometimes)
    result = run("--json")
    assert result.exit_code == EXIT_FAILURES
    first = r"1 of 6 replies are missing, the first, of client \S+ in round 2: MemoryError: \[bold\]full"
    assert re.search(first, join_lines(result.stderr))
    assert "1 reply is missing; fedsim show out lists the rounds; with --allow-failures the exit status would be 0" in join_lines(
        result.stderr
    )
    assert [(row["complete"], row["failed"], row["late"]) for row in json.loads(result.stdout)["per_round"]] == [
        (3, 0, 0),
        (2, 1, 0),
    ]
    again = run("--allow-failures")
    assert again.exit_code == 0
    assert re.fullmatch(f"{first} out is done already", join_lines(again.stderr))


def test_messages_of_a_deployments_server_are_printed_once_wherever_the_run_is(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim.engine import engines as engine

    lines = ["2 of 3 clients are connected; :abc: [bold]wait", "1 of 6 replies are missing, the first, of client c in round 1: x"]

    def deployed(experiment: Any, superlink: Any, on_round: Any, on_words: Any) -> None:
        for line in lines:
            on_words(line)

    monkeypatch.setattr(engine, "run_deployment", deployed)
    result = run_fedsim("run", "small.toml", "--out", "there", "--engine", "deployment", "--superlink", "a:1", "--insecure")
    assert result.exit_code == 0, result.stderr
    assert all(result.stderr.count(line) == 1 for line in lines)
    assert "done; there is on the server" in join_lines(result.stderr)

    lines.append("not everything succeeded: 1 reply is missing; fedsim show there lists the rounds")
    result = run_fedsim("run", "small.toml", "--out", "there", "--engine", "deployment", "--superlink", "a:1", "--insecure")
    assert result.exit_code == EXIT_FAILURES
    assert "1 reply is missing; fedsim show there lists the rounds; with --allow-failures" in join_lines(result.stderr)
    there = ("run", "small.toml", "--out", "there", "--engine", "deployment", "--superlink", "a:1", "--insecure")
    assert run_fedsim(*there, "--allow-failures").exit_code == 0

    def here(experiment: Any, superlink: Any, on_round: Any, on_words: Any) -> None:
        on_words("6 of 6 replies are late")
        engine.run(experiment, engine="local")

    monkeypatch.setattr(engine, "run_deployment", here)
    monkeypatch.setattr("fedsim.server.outcome.check_end", lambda folder, tell: tell("6 of 6 replies are late"))
    result = run_fedsim("run", "small.toml", "--out", "out", "--engine", "deployment")
    assert (result.exit_code, result.stderr.count("6 of 6 replies are late")) == (0, 1)


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_folder_that_cannot_be_made_is_named_with_advice(small: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_ray(*given: Any, **named: Any) -> None:  # Ray wraps the server's error in a RuntimeError
        raise RuntimeError("failed") from NotADirectoryError(20, "Not a directory", "small.toml/out")

    monkeypatch.setattr("flwr.simulation.run_simulation", on_ray)
    refused = run_fedsim("run", "small.toml", "--out", "small.toml/out", "--engine", engine)
    assert refused.exit_code == 2
    assert "small.toml/out: Not a directory; a part of this path is a file; name a folder" in join_lines(refused.stderr)


def test_resources_that_the_machine_lacks_end_a_ray_run_at_once(small: Path) -> None:
    refused = run_fedsim("run", "small.toml", "--out", "out", "--engine", "ray", "--client-cpus", "1000")
    assert refused.exit_code == 1
    assert "--client-cpus must be above 0" in join_lines(refused.stderr)
    assert not (small.parent / "out").exists()
