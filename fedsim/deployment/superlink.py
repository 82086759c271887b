"""`python -m fedsim.deployment.superlink [--control-from NETWORK] OPTIONS`: Flower's SuperLink with a restricted control API.

Flower 1.41 serves everything on one port: the messages of clients, which have keys, and the commands of `flwr` (start a run, with
code that server and clients execute; register a key), which need no password. Any client that reaches the port could run code on
the server and on other clients. Here, commands are accepted only from this machine and from the networks in the option
`--control-from`, which may be repeated.
"""

import sys
from collections.abc import Sequence
from datetime import timedelta
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

Network = IPv4Network | IPv6Network
CONTROL_OPTION = "--control-from"
CONTROL_PATH = "/v1/control"
"""Path below which Flower answers commands."""
DATABASE_OPTION = "--database"
RESTART_SECONDS = 120.0
"""Seconds that server and clients have to report to a restarted SuperLink; they retry at least every 20 seconds."""
REFUSED_MESSAGE = b"Flower's control API is answered to the SuperLink's own machine and network only"


class ControlGuard:
    """ASGI middleware that lets only this machine and `networks` use Flower's control API, which serves Flower's commands.

    HTTP requests to the control API from elsewhere get status 403, and websockets to it are closed. Other paths are not guarded.
    """

    def __init__(self, app: ASGIApp, networks: Sequence[Network] = ()) -> None:
        self.app, self.networks = app, tuple(networks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not _is_control(scope["path"]) or self._is_admitted(scope):
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(REFUSED_MESSAGE)).encode())]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": REFUSED_MESSAGE})

    def _is_admitted(self, scope: Scope) -> bool:
        peer, own = _parse_address(scope.get("client")), _parse_address(scope.get("server"))
        if peer is None:
            return False
        return peer.is_loopback or peer == own or any(peer in network for network in self.networks)


def _is_control(path: str) -> bool:
    """Return whether a URL's path is at or below `CONTROL_PATH`, without regard to case, "//" and "."; True for any ".."."""
    parts = [part for part in path.lower().split("/") if part not in ("", ".")]
    return ".." in parts or parts[:2] == CONTROL_PATH.strip("/").split("/")


def _parse_address(end: Any) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(end[0])
    except (TypeError, ValueError, IndexError):
        return None
    return getattr(found, "ipv4_mapped", None) or found


def split_arguments(arguments: Sequence[str]) -> tuple[list[Network], list[str]]:
    """Split command-line arguments into the networks of `--control-from` and a list of all other arguments, for Flower.

    The option and its network are two arguments, or one joined by "=". Raises ValueError if the option has no valid network.
    """
    networks, rest, given = list[Network](), list[str](), iter(arguments)
    for word in given:
        option, joined, value = word.partition("=")
        if option == CONTROL_OPTION:
            networks.append(read_network(value if joined else next(given, "")))
        else:
            rest.append(word)
    return networks, rest


def read_network(text: str) -> Network:
    """Parse a network such as 10.0.0.0/8. Raises ValueError, with a remedy, if the text is not a network."""
    try:
        return ip_network(text)
    except ValueError as error:
        raise ValueError(f"{CONTROL_OPTION}: {error}; write a network as 10.0.0.0/24") from None


def extend_heartbeats(database: Path, seconds: float) -> int:
    """Let the online clients and running tasks in a SuperLink's database stay valid for `seconds` from now without a heartbeat.

    This is done before a SuperLink restarts. Without it, Flower would fail a task and take a client for lost 60 seconds after the
    last heartbeat, and count the time in which the SuperLink itself was down.
    Returns the number of running tasks; 0 if `database` does not exist or is not Flower's.
    """
    from flwr.supercore.constant import NodeStatus
    from flwr.supercore.date import now
    from flwr.supercore.state.schema.corestate_models import Task
    from flwr.supercore.state.schema.linkstate_models import Node
    from sqlalchemy import create_engine, inspect, update

    if not database.exists():
        return 0
    until = now() + timedelta(seconds=seconds)
    engine = create_engine(f"sqlite:///{database.resolve()}")
    try:
        if not {Task.__tablename__, Node.__tablename__} <= set(inspect(engine).get_table_names()):
            return 0
        running = update(Task).where(Task.token.is_not(None), Task.running_at.is_not(None), Task.finished_at.is_(None))
        with engine.begin() as connection:
            connection.execute(update(Node).where(Node.status == NodeStatus.ONLINE).values(online_until=until.timestamp()))
            extended = connection.execute(running.values(active_until=until).returning(Task.task_id))
            return len(extended.all())
    finally:
        engine.dispose()


def main() -> None:
    """Run Flower's SuperLink with its control API guarded (`ControlGuard`).

    If its database exists already, the heartbeats in it are extended first (`extend_heartbeats`), so that Flower does not fail
    the unfinished runs after a restart.
    """
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink

    try:
        networks, sys.argv[1:] = split_arguments(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
    if DATABASE_OPTION in sys.argv[:-1]:
        extend_heartbeats(Path(sys.argv[sys.argv.index(DATABASE_OPTION) + 1]), RESTART_SECONDS)
    others = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(ControlGuard, networks=networks), *others())
    flower_superlink()


if __name__ == "__main__":
    main()
