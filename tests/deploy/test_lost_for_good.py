"""Tests of a server or a client that is lost and not restarted. The run fails with a message that says how to fix it."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from fedsim.config.experiment import read
from fedsim.deployment.folders import prepare
from fedsim.deployment.native import NativeDeployment, list_parties
from fedsim.deployment.processes import RUNNER_NAME
from fedsim.recording import Recording
from fedsim.recording.files import read_json_lines

pytestmark = pytest.mark.deploy
ROUNDS, MOST_SECONDS = 7, 900
"""Rounds, and a limit of the test. Flower drops a dead node after up to 60 s, and a round without it lasts 20 s, so that up to
four of the rounds after the second may end with a missing reply before the server notices that a client is gone."""


@dataclass
class Outcome:
    """Exit statuses and messages of three runs, the metrics of all rounds, and the statuses recorded in the last round."""

    statuses: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, slowness: float, write_experiment: Any, restart_client: Any) -> Outcome:
    folder, found = tmp_path_factory.mktemp("lost"), Outcome()
    timeout = min(120.0, max(20.0, 9 * slowness))
    experiment = read(write_experiment.write(folder, rounds=ROUNDS, clients=2, timeout=timeout))
    layout = prepare(experiment, folder / "federation")
    native = NativeDeployment(layout, list_parties(layout, 2), secure=False)

    def rounds() -> int:
        return len(read_json_lines(layout.run / "metrics.jsonl")) - 1

    def killing(party: str, after: int) -> Callable[[], None]:
        deadline, killed = time.monotonic() + MOST_SECONDS, []

        def watch() -> None:
            assert time.monotonic() < deadline, "the run hangs"
            if party and not killed and rounds() >= after:
                killed.append(party)
                native.processes.end(party, signal.SIGKILL)

        return watch

    def run(watch: Callable[[], None]) -> None:
        found.statuses.append(native.run(watch))
        found.said.append(" ".join(" ".join(native.processes.read_new_lines(RUNNER_NAME)).split()))

    with native:
        run(killing("server", after=1))
        native.start_server()
        run(killing("client-1", after=rounds() + 1))
        restart_client(native, 1)
        run(killing("", after=0))
    found.metrics = [row for row in read_json_lines(layout.run / "metrics.jsonl") if row["round"]]
    found.recorded = [row.status for row in Recording(layout.run / "recording").read_rows(rounds={ROUNDS})]
    return found


def test_a_dead_server_fails_the_run_with_advice(outcome: Outcome) -> None:
    assert outcome.statuses[0] == 1
    words = "the server's process exited without a message; see its log, start it again and continue with --resume"
    assert words in outcome.said[0]


def test_a_client_that_does_not_come_back_is_reported_and_fails_the_run_with_advice(outcome: Outcome) -> None:
    assert outcome.statuses[1] == 1
    assert outcome.said[1].count("1 of 2 clients are connected; start the others again, they are waited for up to") == 1
    assert "only 1 of 2 clients are connected after" in outcome.said[1]
    assert "start the others again, then continue with --resume" in outcome.said[1]


def test_following_the_advice_completes_the_run_which_reports_missing_replies(outcome: Outcome) -> None:
    assert outcome.statuses[2] == 1
    assert [row["round"] for row in outcome.metrics] == [*range(1, ROUNDS + 1)]
    missing = sum(row["missing"] for row in outcome.metrics)
    assert 1 <= missing < ROUNDS
    assert f"{missing} of {2 * ROUNDS} replies are missing, the first, of client " in outcome.said[2]
    assert outcome.recorded == ["complete", "complete"]
