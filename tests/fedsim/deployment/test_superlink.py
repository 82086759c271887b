"""Flower's control API, which asks for no password: refused to clients, answered to the server's own machine and network."""

import asyncio
from ipaddress import ip_network
from typing import Any

import pytest
from flwr.superlink import extensions, main
from flwr.superlink.routers.control import router

from fedsim.deployment.superlink import CONTROL_PATH, ControlGuard, split_arguments

SERVER = "172.31.86.0/24"


def status(path: str, client: Any, server: Any = ("192.0.2.10", 8000), kind: str = "http") -> int:
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "client": client, "server": server}
    asyncio.run(ControlGuard(app, [ip_network(SERVER)])(scope, None, send))  # type: ignore[arg-type]
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


def test_who_is_not_known_sends_no_commands() -> None:
    for client in (None, ("", 0), ("unix", 0), ()):
        assert status(f"{CONTROL_PATH}/x", client) == 403


@pytest.mark.parametrize("client", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "192.0.2.10", "172.31.86.7"])
def test_the_own_machine_and_the_named_network_send_commands(client: str) -> None:
    assert status(f"{CONTROL_PATH}/start-run", (client, 5)) == 200


def test_the_option_is_taken_out_of_flowers() -> None:
    assert split_arguments(["--port", "8000", "--control-from", SERVER, "--insecure"]) == (
        [ip_network(SERVER)],
        ["--port", "8000", "--insecure"],
    )
    for wrong in (["--control-from"], ["--control-from", "server"], ["--control-from", "10.0.0.1/8"]):
        with pytest.raises(ValueError, match="write a network as"):
            split_arguments(wrong)


def test_flower_answers_commands_where_the_guard_looks_and_has_the_hook_that_it_hangs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a new version of Flower moves either."""
    assert router.prefix == CONTROL_PATH
    assert callable(extensions.get_middleware)
    marked: Any = object()
    monkeypatch.setattr(extensions, "get_middleware", lambda: (marked,))
    assert main._get_middleware()[0] is marked, "outermost"
