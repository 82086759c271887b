"""Tests of access to Flower's control API, which has no password, and of heartbeats after a restart of the SuperLink."""

import asyncio
import sqlite3
import warnings
from collections.abc import Iterator
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import NodeStatus
from flwr.supercore.date import now
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.state.schema.corestate_models import Task
from flwr.supercore.state.schema.linkstate_models import Node
from flwr.superlink import extensions, main
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.routers.control import router
from sqlalchemy import update

from fedsim.deployment.superlink import CONTROL_PATH, ControlGuard, extend_heartbeats, split_arguments

SERVER = "172.31.86.0/24"


def status(path: str, client: Any, server: Any = ("192.0.2.10", 8000), kind: str = "http") -> int:
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "client": client, "server": server}
    asyncio.run(ControlGuard(app, [ip_network(SERVER)])(scope, None, send))
    return int(sent[0].get("status", sent[0].get("code", 0)))


@pytest.mark.parametrize("client", ["192.0.2.11", "172.31.85.4", "10.0.0.1", "2001:db8::1", "::ffff:192.0.2.11"])
def test_a_client_can_send_messages_and_no_commands(client: str) -> None:
    for path in (
        CONTROL_PATH,
        f"{CONTROL_PATH}/start-run",
        "/V1/Control/x",
        "//v1//control/x",
        "/v1/./control",
        "/v1/fleet/../control/x",
    ):
        assert status(path, (client, 5)) == 403, path
    assert status("/v1/fleet/pull-messages", (client, 5)) == 200
    assert status("/v1/controls", (client, 5)) == 200
    assert status(f"{CONTROL_PATH}/x", (client, 5), kind="websocket") == 1008


def test_a_caller_without_an_address_can_send_no_commands() -> None:
    for client in (None, ("", 0), ("unix", 0), ()):
        assert status(f"{CONTROL_PATH}/x", client) == 403


@pytest.mark.parametrize("client", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "192.0.2.10", "172.31.86.7"])
def test_this_machine_and_the_named_network_can_send_commands(client: str) -> None:
    assert status(f"{CONTROL_PATH}/start-run", (client, 5)) == 200


def test_the_option_control_from_is_removed_from_flowers_arguments() -> None:
    assert split_arguments(["--port", "8000", "--control-from", SERVER, "--insecure"]) == (
        [ip_network(SERVER)],
        ["--port", "8000", "--insecure"],
    )
    assert split_arguments([f"--control-from={SERVER}", "--port=8000"]) == ([ip_network(SERVER)], ["--port=8000"])
    for wrong in (["--control-from"], ["--control-from", "server"], ["--control-from=", "10.0.0.1/8"]):
        with pytest.raises(ValueError, match="write a network as"):
            split_arguments(wrong)


def test_flowers_control_path_and_middleware_hook_are_those_of_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new version of Flower could move the path or the hook, and the guard would then protect nothing."""
    assert router.prefix == CONTROL_PATH
    assert callable(extensions.get_middleware)
    marked: Any = object()
    monkeypatch.setattr(extensions, "get_middleware", lambda: (marked,))
    assert main._get_middleware()[0] is marked, "outermost"


@pytest.fixture
def state(tmp_path: Path) -> Iterator[SqlLinkState]:
    factory = LinkStateFactory(str(tmp_path / "state.db"), NoOpFederationManager(), ObjectStoreFactory())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Alembic, about Flower's configuration
        state = factory.state()
    assert isinstance(state, SqlLinkState)
    yield state
    state._engine.dispose()  # Flower's states have no method that closes their connections


def make_outage(state: SqlLinkState) -> tuple[int, int]:
    """Start a task and a node and make their last heartbeats too old; return their numbers."""
    task, node = state.create_task("flwr-serverapp", 1), state.create_node("owner", "name", b"key", 30)
    assert task is not None
    assert state.claim_task(task)
    assert state.activate_task(task)
    assert state.activate_node(node, 30)
    past = now() - timedelta(seconds=1)
    with state.session() as session:
        session.execute(update(Task).values(active_until=past))
        session.execute(update(Node).values(online_until=past.timestamp()))
    return task, node


def is_online(state: SqlLinkState, node: int) -> bool:
    (found,) = state.get_node_info(node_ids=[node])
    return bool(found.status == NodeStatus.ONLINE)


def test_without_extension_flower_drops_a_server_and_a_client_after_an_outage(state: SqlLinkState) -> None:
    task, node = make_outage(state)
    assert not state.acknowledge_task_heartbeat(task)
    assert not is_online(state, node)


def test_after_a_restart_server_and_clients_have_time_to_report(state: SqlLinkState, tmp_path: Path) -> None:
    task, node = make_outage(state)
    assert extend_heartbeats(tmp_path / "state.db", 60) == 1
    assert state.acknowledge_task_heartbeat(task)
    assert is_online(state, node)


def test_tasks_and_nodes_that_had_ended_before_the_restart_stay_ended(state: SqlLinkState, tmp_path: Path) -> None:
    task, node = make_outage(state)
    assert not is_online(state, node)
    assert not state.acknowledge_task_heartbeat(task)
    assert extend_heartbeats(tmp_path / "state.db", 60) == 0
    assert not state.acknowledge_task_heartbeat(task)
    assert not is_online(state, node)


def test_a_first_start_has_nothing_to_extend(tmp_path: Path) -> None:
    assert extend_heartbeats(tmp_path / "none.db", 60) == 0
    assert not (tmp_path / "none.db").exists()
    sqlite3.connect(tmp_path / "other.db").close()
    assert extend_heartbeats(tmp_path / "other.db", 60) == 0
