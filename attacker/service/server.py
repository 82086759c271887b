"""Web server of the application, with time limits for slow clients, and a limit of open connections."""

import asyncio
import gc
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from attacker.service.authorisation import SECURITY_HEADERS
from attacker.service.background import BackgroundWork
from attacker.service.http.middleware import MAX_HEADERS, MAX_PATH
from attacker.service.settings import ServiceSettings

HEAD_SECONDS = 15.0
"""Seconds until the header of a request must have arrived."""
SHUTDOWN_SECONDS = 3
"""Seconds that unfinished responses get when the server stops."""
MAX_CONNECTIONS = 500
"""Largest number of open connections. If one more is opened, the connection that has waited longest without a complete request is
closed."""


class PatientProtocol(H11Protocol):
    """HTTP protocol that closes a connection if no complete request header arrives within `HEAD_SECONDS`.

    The time counts from the opening of the connection, or from the end of its last response. At most `MAX_CONNECTIONS` are kept
    open. The answer to a malformed request has the same security headers as other responses.
    """

    _timer: asyncio.TimerHandle | None = None
    _since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()
        if not transport.is_closing():
            self._wait_for_head()

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a request or the rest of one, since its opening or last response."""
        waiting = (
            connection for connection in self.connections if isinstance(connection, PatientProtocol) and connection.is_waiting
        )
        longest = min(waiting, key=lambda connection: connection._since, default=self)
        longest.transport.abort()

    @property
    def is_waiting(self) -> bool:
        """Whether the connection is open, and waits for a request or for the rest of one."""
        return not self.transport.is_closing() and (not self._is_answering or bool(self.cycle.more_body))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._stop_waiting()
        elif self._timer is None:
            self._wait_for_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._since = self.loop.time()
        if not self._is_answering:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        lines = [f"{name}: {value}" for name, value in SECURITY_HEADERS.items()]
        body = b'{"error":{"message":"the request is no HTTP that is understood, or too long","field":null,"known":null}}'
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close", "", ""]
        self.transport.write("\r\n".join(["HTTP/1.1 400 Bad Request", *lines]).encode() + body)
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if not self._is_answering and not self.transport.is_closing():
            self.transport.close()


class UvicornServer(uvicorn.Server):
    """Server that stops within seconds after a signal, even while web pages keep event streams open."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._feed = app.state.components.feed

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, with `SHUTDOWN_SECONDS` for responses and exit status 0, or at once at the second."""
        self.force_exit, self.should_exit = self.should_exit, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close()
        await super().shutdown(sockets)


def open_listener(settings: ServiceSettings) -> socket.socket:
    """Return a listening TCP socket at host and port of the settings. Raises ValueError, with a remedy, if this fails."""
    where = f"{settings.host} port {settings.port}"
    mend = "choose another address with --host, or another port with --port; --port 0 takes a free one"
    try:
        addresses = socket.getaddrinfo(settings.host.strip("[]"), settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"cannot listen on {where}: {error.strerror or error}; {mend}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {where}: {error.strerror or error}; {mend}") from None
    listener.setblocking(False)
    return listener


def make_server(app: FastAPI, settings: ServiceSettings) -> UvicornServer:
    """Return a server of the application, which is to be run with the socket from `open_listener`.

    Raises ValueError if the files of the TLS certificate and its key cannot be used.
    """
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADERS + MAX_PATH,
        ssl_certfile=settings.certfile,
        ssl_keyfile=settings.keyfile,
        log_level="warning",
        log_config=None,  # uvicorn's own configuration would close the log handlers of all other packages
    )
    try:
        config.load()
    except OSError as error:  # the TLS files are the only files that uvicorn's configuration loads
        reason = getattr(error, "reason", None) or error.strerror or error
        raise ValueError(
            f"cannot use --certfile {settings.certfile} with --keyfile {settings.keyfile}: {reason}; "
            "give a certificate and its own key, both as PEM"
        ) from None
    return UvicornServer(config, app)


def serve_until_stopped(app: FastAPI, settings: ServiceSettings, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Start the background threads, and answer requests until a signal arrives; then stop them and close `listener`.

    listener: the socket from `open_listener`. ready: callback that is called once all recordings have been read, before requests
    are answered.

    Raises ValueError, with the reason, if a setting cannot be applied: for example if the TLS files or the file of rules cannot
    be used, or another service uses the same state folder (which holds token and queue).
    """
    server, background = make_server(app, settings), BackgroundWork(app.state.components)
    try:
        background.start()
        _freeze_objects()
        ready()
        server.run(sockets=[listener])
    finally:
        background.stop()
        listener.close()


def _freeze_objects() -> None:
    """Exclude all present objects, such as PyTorch's, from later garbage collections, which would delay all responses."""
    gc.collect()
    gc.freeze()


def format_address(listener: socket.socket, settings: ServiceSettings) -> str:
    """Return the address at which a browser reaches the service, such as http://127.0.0.1:8600/."""
    host, port = listener.getsockname()[:2]
    host = settings.host if settings.host == "localhost" else host
    return f"{settings.scheme}://{f'[{host}]' if ':' in host else host}:{port}/"
