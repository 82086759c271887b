"""Tests of the commands `fedsim verify`, `fedsim delete` and `fedsim run --resume`."""

import json
from pathlib import Path
from typing import Any

import pytest
from changed_recordings import change_manifest
from cli_runs import SMALL
from command_line import join_lines, run_fedsim

from fedsim.config.experiment import read
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun

EXPERIMENT = SMALL.replace("rounds = 2", "rounds = 3")


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(EXPERIMENT)
    assert run_fedsim("run", "e.toml", "--out", "done", "--engine", "local", "--client-seed", "1").exit_code == 0
    return tmp_path / "done"


def test_an_undamaged_recording_is_verified(finished: Path) -> None:
    result = run_fedsim("verify", "done")
    assert result.exit_code == 0
    assert "9 of 9 observations of 3 rounds are intact" in result.stdout
    assert json.loads(run_fedsim("verify", "done", "--json").stdout)["damaged"] == []


def test_counts_of_one_are_named_in_the_singular(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(EXPERIMENT)
    arguments = ("--engine", "local", "--set", "rounds=1", "--set", "clients.count=1")
    ran = run_fedsim("run", "e.toml", "--out", "one", *arguments)
    assert "1 client, 1 round; writes up to" in join_lines(ran.stderr)
    assert "1 observation of 1 client in 1 round, " in join_lines(ran.stdout)
    assert run_fedsim("verify", "one").stdout == "1 of 1 observation of 1 round are intact\n"


def test_damage_is_named_and_is_status_1(finished: Path) -> None:
    victim = sorted((finished / "recording" / "rounds" / "00002").glob("[0-9a-f]*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-5])
    result = run_fedsim("verify", "done")
    assert result.exit_code == 1
    assert victim.name in result.stdout
    assert "8 of 9 observations of 3 rounds are intact" in result.stdout
    assert "error" not in result.stderr


def test_a_recording_that_names_unadmitted_code_is_not_called_damaged(finished: Path) -> None:
    change_manifest(finished / "recording", defense="somebody:HALVE(keep=0.5)")
    result = run_fedsim("verify", "done")
    assert result.exit_code == 2
    assert "damaged" not in result.stdout + result.stderr
    words = join_lines(result.stderr)
    assert "'somebody:HALVE', which is only imported if you ask for it" in words
    assert "fedsim --code somebody:HALVE verify done" in words


def test_delete_asks_for_confirmation_and_respects_a_no(finished: Path) -> None:
    refused = run_fedsim("delete", "done", input="n\n")
    assert refused.exit_code == 1
    assert "Delete the run done" in refused.stderr
    assert "error" not in refused.stderr
    assert finished.exists()
    assert run_fedsim("delete", "done", input="y\n").exit_code == 0
    assert not finished.exists()


def test_a_folder_that_is_no_run_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    result = run_fedsim("delete", str(tmp_path), "--yes")
    assert result.exit_code == 2
    assert "neither a run nor a recording" in result.stderr.replace("\n", " ")
    assert (tmp_path / "thesis.tex").exists()


def test_an_unfinished_run_can_be_resumed(finished: Path) -> None:
    assert "done already" in run_fedsim("run", "e.toml", "--out", "done", "--engine", "local", "--resume").stderr

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise RuntimeError("power cut")

    cut = FederationRun(experiment=read(Path("e.toml")), out=finished.with_name("cut"), device="cpu", client_seed=1)
    with pytest.raises(engine.EngineError, match="power cut"):
        engine.run(cut, engine="local", on_round=stop)
    refused = run_fedsim("run", "e.toml", "--out", "cut", "--engine", "local")
    assert refused.exit_code == 2
    assert "2 of 3 rounds; continue it with --resume, or delete it first with" in refused.stderr.replace("\n", " ")
    other = run_fedsim("run", "e.toml", "--out", "cut", "--engine", "local", "--resume", "--client-seed", "2")
    assert other.exit_code == 2
    assert "began with 1; omit the option to resume it" in other.stderr.replace("\n", " ")
    again = run_fedsim("run", "e.toml", "--out", "cut", "--engine", "local", "--resume")
    assert again.exit_code == 0
    whole, resumed = (
        {p.name: p.read_bytes() for p in (finished.with_name(name) / "recording" / "rounds").rglob("*.safetensors")}
        for name in ("done", "cut")
    )
    assert whole == resumed
    assert "holds no run to resume" in run_fedsim("run", "e.toml", "--out", "new", "--engine", "local", "--resume").stderr


def test_only_some_rounds_and_clients_are_recorded(finished: Path) -> None:
    done = run_fedsim(
        "run", "e.toml", "--out", "some", "--engine", "local", "--record-rounds", "2-3", "--record-clients", "1", "--json"
    )
    assert done.exit_code == 0
    result = json.loads(done.stdout)
    assert [row["round"] for row in result["per_round"]] == [2, 3]
    assert len(result["clients"]) == 1
    wrong = run_fedsim("run", "e.toml", "--out", "none", "--record-clients", "../x")
    assert wrong.exit_code == 2
    assert "not a valid client name" in wrong.stderr.replace("\n", " ")
