"""Tests of clients that drop out of a round of secure aggregation at any exchange, in any way."""

from typing import Any

import pytest
import torch
from failing_grid import Failing, Fails
from flwr.serverapp.strategy import FedAvg
from secure_runs import EPOCH, assert_is_mean, of_partitions, recorded
from tiny_experiments import Federate

from fedsim.commands.maintenance import verify
from fedsim.engine import engines as engine
from fedsim.engine.engines import EngineError
from fedsim.engine.run import FederationRun
from fedsim.recording import Row
from fedsim.recording.files import read_json_lines


def make_clients_fail(monkeypatch: pytest.MonkeyPatch, kind: str, fails: Fails) -> None:
    for other in ("fails", "late", "lost"):
        monkeypatch.setattr(Failing, other, fails if other == kind else {})
    monkeypatch.setattr(engine, "LocalGrid", Failing)


def rows_of(run: FederationRun, number: int) -> dict[str, Row]:
    return {row.client: row for row in recorded(run).read_rows(rounds={number})}


@pytest.mark.parametrize("kind", ["fails", "late", "lost"])
@pytest.mark.parametrize("stage", ["setup", "share", "collect", "unmask"])
def test_the_mean_is_that_of_the_clients_whose_vectors_arrived(
    stage: str, kind: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = federate("plain", **EPOCH, secure_aggregation=False, rounds=1)
    make_clients_fail(monkeypatch, kind, {(1, stage): (1, 3)})
    secure = federate("secure", **EPOCH, rounds=2)
    names = of_partitions(secure)
    gone = set() if stage == "unmask" else {names[1], names[3]}
    updates = [o for o in recorded(plain).read_observations() if o.client not in gone]
    found = next(iter(recorded(secure).read_observations(rounds={1})))
    assert found.cohort == tuple(o.client for o in updates)
    assert_is_mean(secure, found, updates)
    rows = rows_of(secure, 1)
    reason = "exchange '{}': told to fail" if kind == "fails" else "no answer in time at exchange '{}'"
    for partition in (1, 3):
        known = rows.get(names[partition]) or next(row for row in rows.values() if row.client.isdigit())
        assert reason.format(stage) in known.reason
        assert known.status == ("masked" if stage == "unmask" else "failed" if kind == "fails" else "late")
    again = next(iter(recorded(secure).read_observations(rounds={2})))  # clients that failed take part in the next round
    assert len(again.cohort) == 5


@pytest.mark.parametrize(("kind", "errors"), [("fails", 2), ("late", 0)])
def test_the_strategy_gets_errors_of_failed_clients_and_nothing_of_late_ones(
    kind: str, errors: int, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[list[bool]] = []
    real = FedAvg.aggregate_train

    def spy(self: Any, server_round: int, replies: Any) -> Any:
        got.append([reply.has_error() for reply in replies])
        return real(self, server_round, replies)

    monkeypatch.setattr(FedAvg, "aggregate_train", spy)
    make_clients_fail(monkeypatch, kind, {(1, "collect"): (0, 4)})
    federate(rounds=1)
    assert sorted(got[0]) == [False] * 3 + [True] * errors


@pytest.mark.parametrize("stage", ["setup", "share", "collect", "unmask"])
def test_below_the_threshold_the_round_is_lost_and_the_run_continues(
    stage: str, federate: Federate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_clients_fail(monkeypatch, "fails", {(1, stage): (0, 1, 2)})
    run = federate(rounds=2)
    expected = f"2 of 5 clients answered at exchange '{stage}', and the threshold is 3"
    assert expected in caplog.text
    rows = rows_of(run, 1)
    assert "sum" not in rows
    assert [row.status for row in rows.values()] == ["failed"] * 5
    assert sum(expected in row.reason for row in rows.values()) == 2
    one, two = (recorded(run).read_sent(number).weights for number in (1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    metrics = read_json_lines(run.out / "metrics.jsonl")
    assert [(row["clients"], row["missing"]) for row in metrics[1:]] == [(0, 5), (5, 0)]
    assert len(next(iter(recorded(run).read_observations())).cohort) == 5
    assert verify(run.out).damaged == ()


def test_no_client_is_asked_for_shares_if_the_round_is_lost_before(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    make_clients_fail(monkeypatch, "fails", {(1, "collect"): (0, 1, 2)})
    with pytest.raises(EngineError, match="no client ever answered: 5 of 5 replies are missing"):
        federate(rounds=1)
    assert "unmask" not in {stage for stage, *_ in Failing.seen}
