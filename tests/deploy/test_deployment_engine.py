"""Tests of `fedsim run --engine deployment`, one command for a federation of processes, also with secure aggregation."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import join_lines, run_fedsim
from processes import wait_until

from fedsim.config.experiment import read
from fedsim.deployment.folders import prepare
from fedsim.deployment.mounts import explain_missing_isolation
from fedsim.deployment.processes import find_free_port
from fedsim.recording import Recording

PROGRAM = [sys.executable, "-c", "from fedsim.cli import main; main()", "run"]


@pytest.mark.deploy
def test_secure_aggregation_gives_the_same_sum_on_a_deployment_as_in_one_process(tmp_path: Path, write_experiment: Any) -> None:
    path, sums = write_experiment.write(tmp_path, rounds=1, clients=2), {}
    for engine in ("deployment", "local"):
        words = ["run", str(path), "--device", "cpu", "--out", str(tmp_path / engine), "--engine", engine, "--client-seed", "7"]
        done = run_fedsim(*words, "--set", "secure_aggregation=true", "--json")
        assert done.exit_code == 0, done.stderr
        recording = Recording(tmp_path / engine / "recording")
        (sums[engine],) = recording.read_observations()
        assert [row.status for row in recording.read_rows() if row.client != "sum"] == ["masked"] * 2
    assert sums["deployment"].cohort == sums["local"].cohort
    assert all(torch.equal(t, sums["local"].update[name]) for name, t in sums["deployment"].update.items())


@pytest.mark.deploy
def test_an_interrupted_run_ends_all_processes_that_it_started(tmp_path: Path, write_experiment: Any) -> None:
    write_experiment.write(tmp_path, rounds=1, clients=2)
    mark = f"mark-{os.getpid()}"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "FEDLEAK_MARK": mark}
    command = [*PROGRAM, "e.toml", "--engine", "deployment", "--out", "run"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: len(marked(mark)) >= 3)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted" in words
    wait_until(lambda: not marked(mark), seconds=30)  # killed processes may take a moment to disappear
    assert list(tmp_path.glob("fedleak-*")) == []


def marked(mark: str) -> list[int]:
    """Return the ids of processes with the mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.deploy
def test_a_native_run_without_any_answer_fails_with_the_reason_from_the_server(tmp_path: Path, write_experiment: Any) -> None:
    path, root = write_experiment.write(tmp_path, rounds=1, clients=1), Path(__file__).parents[2]
    layout = prepare(read(path), tmp_path / "federation")
    for data in layout.root.glob("clients/*/data/*"):
        data.write_text("garbage")
    command = [sys.executable, str(root / "deploy" / "native"), str(path), str(layout.root), "--insecure"]
    command += ["--open"] if explain_missing_isolation() else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    output = join_lines(done.stderr)
    assert done.returncode == 1, output
    assert "no client ever answered: 1 of 1 replies are missing, the first, of client " in output
    assert (
        f"correct the cause, then delete all in {layout.attacked / 'recording'}, and all in {layout.run} but the link to it"
        in output
    )
    assert "recorded in" not in output


@pytest.mark.parametrize(
    ("words", "status", "advice"),
    [
        (["--engine", "deployment", "--superlink", "127.0.0.1:{port}", "--insecure"], 1, "no SuperLink answers at 127.0.0.1:"),
        (["--engine", "deployment", "--superlink", "127.0.0.1:{port}"], 2, "either --root-certificates FILE or --insecure"),
        (["--engine", "deployment", "--superlink", "nowhere", "--insecure"], 2, "write it as HOST:PORT"),
        (["--engine", "deployment", "--superlink", "127.0.0.1:99999", "--insecure"], 2, "write it as HOST:PORT"),
        (["--engine", "deployment", "--insecure"], 2, "require --superlink ADDRESS"),
        (["--engine", "local", "--superlink", "127.0.0.1:{port}", "--insecure"], 2, "require --engine deployment"),
        (["--engine", "deployment", "--superlink", "a:1", "--root-certificates", "no.crt"], 2, "no.crt is no file"),
    ],
)
def test_wrong_or_unreachable_superlinks_are_refused_with_advice(
    words: list[str], status: int, advice: str, tmp_path: Path, write_experiment: Any
) -> None:
    path = write_experiment.write(tmp_path, rounds=1, clients=2)
    given = ["run", str(path), "--device", "cpu", "--out", str(tmp_path / "run"), *words]
    done = run_fedsim(*[word.format(port=find_free_port()) for word in given])
    assert (done.exit_code, type(done.exception)) == (status, SystemExit)
    assert advice in join_lines(done.stderr)
    assert not (tmp_path / "run").exists()


def test_the_native_run_reports_a_missing_experiment_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["native", "none.toml", str(tmp_path / "federation")])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(Path(__file__).parents[2] / "deploy" / "native"))
    assert end.value.code == 2
    assert "none.toml: no such file" in " ".join(capsys.readouterr().err.split())
