"""Tests of the end of a run: without any answer it has failed, and missing replies are reported."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_experiments import Federate

from fedsim.deployment.flower_commands import WARNING_LINE
from fedsim.engine import engines as engine
from fedsim.engine.engines import EngineError
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording
from fedsim.recording.files import read_json_lines
from fedsim.server.outcome import FAILURE_PREFIX, EmptyRunError, check_end

CLEARED = "correct the cause, then fedsim delete {folder}, and run again; it cannot be resumed, since all rounds are done"


def unplug(monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """Make training fail in the given calls, counted from 1 over all clients, or in every call if none is given."""
    import fedsim.client.app as client_side

    real, done = client_side.train, []

    def sometimes(*arguments: Any, **named: Any) -> Any:
        done.append(1)
        if not calls or len(done) in calls:
            raise OSError("sensor\n  unplugged")
        return real(*arguments, **named)

    monkeypatch.setattr(client_side, "train", sometimes)


def name_first(folder: Path) -> str:
    """Return how the first missing reply of a run is named, whose node id Flower draws."""
    row = next(row for row in Recording(folder / "recording").read_rows() if row.status == "failed")
    return f"the first, of client {row.client} in round {row.round}"


def end(folder: Path) -> list[str]:
    messages: list[str] = []
    check_end(folder, messages.append)
    return messages


def test_a_federation_without_any_answer_fails_with_the_reason_and_advice(
    federate: Federate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unplug(monkeypatch)
    with pytest.raises(EngineError) as failed:
        federate(rounds=2)
    words = f"no client ever answered: 6 of 6 replies are missing, {name_first(tmp_path / 'run')}: OSError: sensor unplugged; "
    expected = words + CLEARED.format(folder=tmp_path / "run")
    assert str(failed.value) == expected
    assert [row["round"] for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")] == [
        0,
        1,
        2,
    ]  # the run itself is complete
    with pytest.raises(EmptyRunError) as later:
        end(tmp_path / "run")
    assert str(later.value) == expected


def test_one_answer_is_enough_and_the_server_warns_of_the_others_once(
    federate: Federate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unplug(monkeypatch, 1, 2, 3, 5, 6)
    monkeypatch.setattr(engine, "set_verbosity", lambda verbose: logging.getLogger("flwr").setLevel(logging.INFO))
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    run = federate(rounds=2)
    words = f"5 of 6 replies are missing, {name_first(run.out)}: OSError: sensor unplugged"
    assert [record.message for record in caplog.records if "replies are missing, " in record.message] == [words]
    assert end(run.out) == [words]
    (messages,) = [record for record in caplog.records if record.message.startswith(FAILURE_PREFIX)]
    assert messages.message == f"{FAILURE_PREFIX}5 replies are missing; fedsim show {run.out} lists the rounds"
    warning = WARNING_LINE.match(
        f"{messages.levelname} :     {messages.message}"
    )  # the line of the server's log that a runner on another machine reads
    assert warning[1] == messages.message


def test_a_complete_run_has_nothing_to_report(federate: Federate) -> None:
    assert end(federate(rounds=1).out) == []


def test_resuming_a_run_without_any_answer_fails_as_well(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server checks all rounds, also those of earlier attempts."""
    unplug(monkeypatch)
    monkeypatch.setattr(FederationRun, "is_done", lambda run: False)
    for _ in range(2):
        with pytest.raises(EngineError, match="no client ever answered: 3 of 3 replies are missing"):
            federate(rounds=1, resume=True)


def test_a_run_that_recorded_nothing_has_failed(federate: Federate) -> None:
    words = r"nothing was recorded: no client of record\.clients, .*; change these settings, then fedsim delete .*, and run again"
    with pytest.raises(EngineError, match=words):
        federate(rounds=1, record={"clients": "3f2a"})


def test_a_reason_that_is_not_recorded_is_reported_as_unknown(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    unplug(monkeypatch)
    with pytest.raises(
        EngineError, match="3 of 3 replies are missing, why is not recorded: see the clients' logs; correct the cause"
    ):
        federate(rounds=1, record={"clients": "2"})


def test_under_secure_aggregation_a_run_without_any_answer_fails_as_well(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    unplug(monkeypatch)
    with pytest.raises(
        EngineError,
        match=r"no client ever answered: 3 of 3 replies are missing, the first, of client \S+ in round 1: .*unplugged",
    ):
        federate(rounds=1, secure_aggregation={"threshold": 2})


def test_a_failed_deployment_can_be_repeated_after_following_the_advice(
    federate: Federate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After following the advice, the next run is recorded in the folder that the attacker sees."""
    run, seen = tmp_path / "server" / "run", tmp_path / "attacks" / "run" / "recording"
    run.mkdir(parents=True)
    seen.mkdir(parents=True)
    (run / "recording").symlink_to("../../attacks/run/recording")
    with monkeypatch.context() as patched:
        unplug(patched)
        with pytest.raises(EngineError, match=f"then delete all in {seen}, and all in {run} but the link to it, and run again"):
            federate("server/run", rounds=1)
    for path in (*seen.iterdir(), *run.iterdir()):
        if path.is_symlink():
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    federate("server/run", rounds=1)
    assert [row.status for row in Recording(seen).read_rows()] == ["complete"] * 3
