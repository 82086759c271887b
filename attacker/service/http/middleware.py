"""ASGI middleware that refuses forbidden requests, limits sizes and times, and sets the security headers."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attacker.service.authorisation import SECURITY_HEADERS, is_loopback_name, is_own, parse_hostname
from attacker.service.sessions import Keys
from attacker.service.settings import ServiceSettings

CLIENT_SECONDS = 30.0
"""Seconds in which a client must have sent the body of a changing request, or received the next part of a response."""
MAX_PATH = 4096
MAX_HEADERS = 16 * 1024
API_PREFIX = "/api/v1"
TOKEN_FREE_REQUESTS = frozenset(
    {("GET", f"{API_PREFIX}/health"), ("HEAD", f"{API_PREFIX}/health"), ("POST", f"{API_PREFIX}/session")}
)
CHANGING_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
KNOWN_METHODS = CHANGING_METHODS | {"GET", "HEAD"}

log = logging.getLogger("attacker.service")
Headers = MutableMapping[str, str]


class RefusedRequest(Exception):
    """Raised for a request that the middleware refuses with an error response.

    status: HTTP status. headers: further headers of the response, given with _ in place of -.
    """

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


class LoggedOut(Exception):
    """Raised if the session of a request ended before the response was complete."""


class TooSlow(Exception):
    """Raised if a client sends its request, or receives its response, too slowly."""


class Disconnected(Exception):
    """Raised if a client disconnects before its request is complete."""


class Guard:
    """ASGI middleware that refuses requests that are not allowed, too large or too slow, and adds the security headers.

    A response is cut off if the session of its request ends, or if the client receives it too slowly.

    patience: seconds that a client may take, see `CLIENT_SECONDS`.
    """

    def __init__(self, app: ASGIApp, *, patience: float = CLIENT_SECONDS) -> None:
        self.app, self.patience = app, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"the protocol {scope['type']!r} is not supported")
        answer = _SecuredSender(send, self.patience)
        try:
            await self._answer(scope, receive, answer)
        except LoggedOut:
            log.info("a response was cut off, because the session of its request has ended")
        except Disconnected:
            log.info("a client disconnected before its request was complete")
        except TooSlow:
            log.info("the rest of a response was given up, because the client received it too slowly")

    async def _answer(self, scope: Scope, receive: Receive, answer: "_SecuredSender") -> None:
        """Send the application's response, or an error response if the request is refused or the application fails."""
        try:
            headers, components = _read_headers(scope), scope["app"].state.components
            settings = components.settings
            answer.admitted = _check(scope, headers, settings, components.keys)
            if scope["method"] in CHANGING_METHODS:
                receive = _replay_body(await _read_body(receive, settings.max_body, self.patience), receive)
            await self.app(scope, receive, answer.send)
        except (LoggedOut, Disconnected, TooSlow):
            raise
        except RefusedRequest as refused:
            await answer.refuse(scope, refused)
        except Exception:  # a bug: the client gets a plain error, and the log the traceback
            log.exception("%s %s failed", scope["method"], scope["path"][:200])
            if not answer.begun:
                await answer.refuse(scope, RefusedRequest(500, "an error in the service; see its log"))


def _check(scope: Scope, headers: Headers, settings: ServiceSettings, keys: Keys | None) -> Callable[[], bool]:
    """Check whether a request is allowed; return a function that returns whether its response may still be sent.

    The method, the length of the address, the host, and the token or session are checked; for a request that changes something
    also what `_check_change` checks. Raises RefusedRequest if the request is not allowed. The returned function returns False
    once the session has ended; for requests with a token, or without need of one, it always returns True.
    keys: the token and the open sessions; None if no token is required.
    """
    method, path = scope["method"], scope["path"]
    if method not in KNOWN_METHODS:
        raise RefusedRequest(405, f"the method {method[:20]} is not supported", Allow="GET, HEAD, POST, DELETE")
    if len(scope.get("raw_path", b"")) + len(scope["query_string"]) > MAX_PATH:
        raise RefusedRequest(400, f"the address is longer than {MAX_PATH} characters")
    _check_host(headers, settings)
    if method in CHANGING_METHODS:
        _check_change(method, headers, settings)
    if keys is None or not _needs_token(method, path) or _has_token(headers, keys):
        return lambda: True
    cookie = read_session(headers, settings, keys)
    if not keys.is_open(cookie):
        wrong = "the token is wrong" if "authorization" in headers else "a token is needed"
        message = f"{wrong}: send the header Authorization: Bearer TOKEN; the service prints the token's file when it starts"
        raise RefusedRequest(401, message, WWW_Authenticate="Bearer")
    return lambda: keys.is_open(cookie)


def _check_host(headers: Headers, settings: ServiceSettings) -> None:
    host = headers.get("host", "")
    if parse_hostname(host) is None:
        raise RefusedRequest(400, f"the Host header {host[:100]!r} is not a host name; write it as localhost:8000")
    if settings.is_loopback and not is_loopback_name(host):
        raise RefusedRequest(
            400, f"the host must be localhost, 127.0.0.1 or [::1], got {host[:100]!r}; see --host to serve other machines"
        )


def _check_change(method: str, headers: Headers, settings: ServiceSettings) -> None:
    """Raise RefusedRequest for a changing request that may come from another site's page, or that declares too large a body.

    The header Origin, if given, must name the service's host and port. Sec-Fetch-Site, if given, must be "same-origin" or "none".
    The content type must be JSON (a DELETE may have none). Without permission by CORS, browsers let other sites' pages send forms
    and plain text, but neither JSON nor DELETE requests.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
    if (origin is not None and not is_own(origin, headers["host"])) or site not in ("same-origin", "none"):
        raise RefusedRequest(403, "the request comes from a page of another site, and such pages must not change anything")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and (method != "DELETE" or kind):
        raise RefusedRequest(
            415, f"the Content-Type must be application/json for requests that change something, got {kind[:100]!r}"
        )
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal()):
        raise RefusedRequest(400, f"Content-Length must be a number, got {length[:100]!r}")
    if int(length[:20]) > settings.max_body:
        raise RefusedRequest(413, f"the request is larger than {settings.max_body} bytes")


def _has_token(headers: Headers, keys: Keys) -> bool:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and keys.is_token(token.strip())


def read_session(headers: Mapping[str, str], settings: ServiceSettings, keys: Keys | None) -> str:
    """Return the value of this service's session cookie in a request; "" if the cookie is missing or cannot be parsed.

    headers: of the request. settings, keys: of the service; they determine the cookie's name, see `make_cookie_name`.
    """
    return _read_cookie(headers.get("cookie", ""), make_cookie_name(settings, keys))


def _needs_token(method: str, path: str) -> bool:
    """Return whether a request needs the token or a session; health, login and the page's files hold no results and do not."""
    return (method, path) not in TOKEN_FREE_REQUESTS and (path.startswith(("/api", "/metrics")) or method not in ("GET", "HEAD"))


def make_cookie_name(settings: ServiceSettings, keys: Keys | None) -> str:
    """Return the name of the session cookie of the service with these settings and keys.

    If the service has a token, the name contains a code that depends on it, since browsers send the cookies of a host to all its
    ports, where another service may run. Under TLS the prefix `__Host-` restricts the cookie to this host.
    """
    name = "fedleak" if keys is None else f"fedleak-{keys.name}"
    return f"__Host-{name}" if settings.certfile else name


def _read_headers(scope: Scope) -> Headers:
    """Return headers by lower-case name; values of a repeated header are joined by "; ".

    Raises RefusedRequest if the headers are too long together, or if Host, Origin, Authorization, Content-Type or Content-Length
    is repeated.
    """
    headers: dict[str, str] = {}
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
        raise RefusedRequest(400, f"the headers are longer than {MAX_HEADERS} bytes")
    for raw, value in scope["headers"]:
        name = raw.decode("latin-1").lower()
        if name in headers and name in ("host", "origin", "authorization", "content-type", "content-length"):
            raise RefusedRequest(400, f"the header {name} is given twice")
        headers[name] = f"{headers[name]}; {value.decode('latin-1')}" if name in headers else value.decode("latin-1")
    return headers


def _read_cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


async def _read_body(receive: Receive, limit: int, patience: float) -> bytes:
    """Return the body of a request.

    Raises RefusedRequest if it has more than `limit` bytes, whatever its headers claim, or is not complete after `patience`
    seconds, and Disconnected if the client disconnects.
    """
    body = bytearray()

    async def read() -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise Disconnected
            body.extend(message.get("body", b""))
            more = message.get("more_body", False)
            if len(body) > limit:
                raise RefusedRequest(413, f"the request is larger than {limit} bytes")

    try:
        await _wait_in_time(read(), patience)
    except TooSlow:
        raise RefusedRequest(408, f"the request was not complete after {patience:g} seconds; send it again") from None
    return bytes(body)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a receiver that first returns the body that was read already, and then further messages such as a disconnect."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


class _SecuredSender:
    """A sender of responses that adds the security headers which a response lacks.

    It raises LoggedOut if the session ends during the response, and TooSlow if the client does not receive a piece within
    `patience` seconds. admitted: function that returns whether the response may still be sent; for a session, whether it is open.
    """

    admitted: Callable[[], bool] = staticmethod(lambda: True)

    def __init__(self, send: Send, patience: float) -> None:
        self._send, self._patience, self.begun = send, patience, False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
        elif message.get("more_body") and not self.admitted():
            raise LoggedOut
        await _wait_in_time(self._send(message), self._patience)

    async def refuse(self, scope: Scope, refused: RefusedRequest) -> None:
        content = json.dumps(make_problem(str(refused))).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content)), "Connection": "close"}
        pairs = [(name.encode(), value.encode()) for name, value in (headers | refused.headers).items()]
        await self.send({"type": "http.response.start", "status": refused.status, "headers": pairs})
        await self.send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


async def _wait_in_time(work: Awaitable[Any], patience: float) -> Any:
    try:
        async with asyncio.timeout(patience):
            return await work
    except TimeoutError:
        raise TooSlow from None


def make_problem(message: str, field: str | None = None, known: list[str] | None = None) -> dict[str, Any]:
    """Return an error as `schemas.Problem`. field: name of the wrong field of the request. known: its allowed values."""
    return {"error": {"message": message, "field": field, "known": known}}
