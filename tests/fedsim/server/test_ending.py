"""A run without a single answer has failed, for the server itself and for whoever asks later."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsim.deployment.flower_commands import WARNING_LINE
from fedsim.engine import engines as engine
from fedsim.engine.engines import EngineError
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording
from fedsim.recording.files import read_json_lines
from fedsim.server.outcome import FAILURE_PREFIX, EmptyRunError, check_end

Federate = Callable[..., FederationRun]
CLEARED = "correct the cause, then fedsim delete {folder}, and run again: no round is left to resume"


def unplug(monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """Clients fail in these calls of theirs, counted from 1; in all of them without any."""
    import fedsim.client.app as client_side

    real, done = client_side.train, []

    def sometimes(*arguments: Any, **named: Any) -> Any:
        done.append(1)
        if not calls or len(done) in calls:
            raise OSError("sensor\n  unplugged")
        return real(*arguments, **named)

    monkeypatch.setattr(client_side, "train", sometimes)


def end(folder: Path) -> list[str]:
    told: list[str] = []
    check_end(folder, told.append)
    return told


def test_a_federation_that_nobody_answered_fails_by_itself_with_the_reason_and_the_mend(
    federate: Federate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unplug(monkeypatch)
    words = "no client ever answered: 6 of 6 replies are missing, the first: OSError: sensor unplugged; "
    expected = words + CLEARED.format(folder=tmp_path / "run")
    with pytest.raises(EngineError) as failed:
        federate(rounds=2)
    assert str(failed.value) == expected
    assert [row["round"] for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]  # all of it is kept
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
    words = "5 of 6 replies are missing, the first: OSError: sensor unplugged"
    assert [record.message for record in caplog.records if "replies are missing, " in record.message] == [words]
    assert end(run.out) == [words]
    (told,) = [record for record in caplog.records if record.message.startswith(FAILURE_PREFIX)]
    assert told.message == f"{FAILURE_PREFIX}5 replies are missing; fedsim show {run.out} lists the rounds"
    heard = WARNING_LINE.match(f"{told.levelname} :     {told.message}")  # as it stands in the log that a runner elsewhere reads
    assert heard is not None
    assert heard[1] == told.message


def test_a_whole_run_has_nothing_to_tell(federate: Federate) -> None:
    assert end(federate(rounds=1).out) == []


def test_resuming_where_no_round_is_left_fails_as_well(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server looks back at all rounds, and not only at those that it ran itself."""
    unplug(monkeypatch)
    monkeypatch.setattr(FederationRun, "is_done", lambda run: False)
    for _ in range(2):
        with pytest.raises(EngineError, match="no client ever answered: 3 of 3 replies are missing"):
            federate(rounds=1, resume=True)


def test_a_run_that_recorded_nothing_has_failed(federate: Federate) -> None:
    words = (
        r"nothing was recorded: no client of record\.clients, or no round .*; change these, then fedsim delete .*, and run again"
    )
    with pytest.raises(EngineError, match=words):
        federate(rounds=1, record={"clients": "3f2a"})


def test_where_the_reason_is_not_recorded_it_says_so(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    unplug(monkeypatch)
    with pytest.raises(
        EngineError, match="3 of 3 replies are missing, why is not recorded: see the clients' logs; correct the cause"
    ):
        federate(rounds=1, record={"clients": "2"})


def test_under_secure_aggregation_it_is_the_same(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    unplug(monkeypatch)
    with pytest.raises(EngineError, match=r"no client ever answered: 3 of 3 replies are missing, the first: .*unplugged"):
        federate(rounds=1, secure_aggregation={"threshold": 2})


def test_the_folders_of_a_deployment_are_emptied_and_stay(
    federate: Federate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doing as it says there, the next run is recorded where the attacker looks."""
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
