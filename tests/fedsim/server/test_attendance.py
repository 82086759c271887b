"""Tests that a server waits, with a warning and for a limited time, for clients that disconnect between rounds."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from tiny_experiments import Federate

from fedsim.engine import engines as engine
from fedsim.engine.engines import EngineError, LocalGrid
from fedsim.recording import Recording
from fedsim.recording.files import read_json_lines
from fedsim.server import attendance
from fedsim.server.attendance import WaitingGrid


class Clock:
    """A clock whose time passes only in `sleep`."""

    def __init__(self) -> None:
        self.now, self.slept = 1000.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1
        if self.slept > 10_000:  # fail instead of hanging
            raise AssertionError("waits without end")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(attendance, "monotonic", clock.monotonic)
    monkeypatch.setattr(attendance, "sleep", clock.sleep)
    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", clock.sleep)
    return clock


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(engine, "set_verbosity", lambda verbose: None)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    return lambda: [record.message for record in caplog.records if "connected" in record.message]


class Leaving(LocalGrid):
    """A grid in which a client is missing after each round until `get_node_ids` was called `away` times."""

    away = 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        self.looks = 0
        return super().send_and_receive(messages, timeout=timeout)

    def get_node_ids(self) -> Iterable[int]:
        nodes = list(super().get_node_ids())
        if not hasattr(self, "looks"):
            return nodes
        self.looks += 1
        return nodes[1:] if self.looks <= self.away else nodes


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    def go(looks: int) -> None:
        monkeypatch.setattr(Leaving, "away", looks)
        monkeypatch.setattr(engine, "LocalGrid", Leaving)

    return go


@pytest.mark.parametrize("changes", [{}, {"secure_aggregation": {"threshold": 2}}])
def test_a_client_that_does_not_come_back_ends_the_run_which_can_be_resumed(
    changes: dict[str, Any],
    federate: Federate,
    leave: Callable[[int], None],
    clock: Clock,
    warnings: Callable[[], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave(10**9)
    words = r"only 2 of 3 clients are connected after 90 seconds; start the others again, .*--resume"
    with pytest.raises(EngineError, match=words):
        federate(rounds=2, timeout=90, **changes)
    assert 90 <= clock.now - 1000 <= 91
    waiting = "2 of 3 clients are connected; start the others again, they are waited for up to 90 seconds"
    assert warnings() == [waiting]  # only once
    assert [row["round"] for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    monkeypatch.setattr(engine, "LocalGrid", LocalGrid)
    run = federate(rounds=2, timeout=90, resume=True, **changes)
    assert [row["missing"] for row in read_json_lines(run.out / "metrics.jsonl")[1:]] == [0, 0]


def test_a_client_that_comes_back_in_time_takes_part_in_all_rounds(
    federate: Federate, leave: Callable[[int], None], clock: Clock, warnings: Callable[[], list[str]]
) -> None:
    leave(20)
    run = federate(rounds=2, timeout=90)
    assert 0 < clock.now - 1000 < 20
    assert len(warnings()) == 1
    assert [row.status for row in Recording(run.out / "recording").read_rows()] == ["complete"] * 6


def test_with_all_clients_connected_the_server_does_not_wait_or_warn(
    federate: Federate, clock: Clock, warnings: Callable[[], list[str]]
) -> None:
    federate(rounds=3)
    assert (clock.slept, warnings()) == (0, [])


class Listing(LocalGrid):
    """A grid whose connected nodes a function lists."""

    def __init__(self, list_nodes: Callable[[], list[int]]) -> None:
        self.get_node_ids = list_nodes


def test_more_clients_than_needed_are_accepted() -> None:
    assert list(WaitingGrid(Listing(lambda: [1, 2, 3, 4]), 3, patience=0).get_node_ids()) == [1, 2, 3, 4]


def test_a_round_begins_within_a_second_after_the_last_client_connects() -> None:
    """This test uses the system's clock."""
    back = threading.Event()
    threading.Timer(0.2, back.set).start()
    assert attendance.POLL_SECONDS <= 1
    coming = Listing(lambda: [1, 2] if back.is_set() else [1])
    assert list(WaitingGrid(coming, 2, patience=30).get_node_ids()) == [1, 2]
