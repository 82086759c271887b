"""Tests of requests that the service refuses: from other sites, too large or too slow, or for files; and headers of answers."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attacker.service.authorisation import SECURITY_HEADERS
from attacker.service.http.middleware import Guard
from attacker.service.settings import ServiceSettings

Ask = Callable[..., Any]
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:8601"},
        {"Origin": "http://localhost:8600.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_requests_of_other_sites_are_refused(ask: Ask, headers: dict[str, str]) -> None:
    asked = ask()
    spec = {"recording": "digits", "attack": "cpl"}
    assert asked("/api/v1/jobs", "POST", json=spec, headers=headers).status_code == 403
    assert asked("/api/v1/jobs", "POST", json=spec, headers={"Origin": "http://localhost:8600"}).status_code == 201
    assert len(asked.json("jobs")["items"]) == 1


def test_no_answer_allows_other_origins(ask: Ask) -> None:
    asked = ask()
    for method in ("GET", "OPTIONS"):
        headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        answer = asked("/api/v1/recordings", method, headers=headers)
        assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "application/jsonx"]
)
def test_other_content_types_than_json_are_refused(ask: Ask, kind: str) -> None:
    asked = ask()
    content = b'{"recording": "digits", "attack": "cpl"}'
    for path in ("/api/v1/jobs", "/api/v1/jobs/x/cancel", "/api/v1/session"):
        assert asked(path, "POST", content=content, headers={"Content-Type": kind}).status_code == 415
    assert asked.json("jobs")["items"] == []


def test_too_large_body_is_refused_with_and_without_a_length(ask: Ask) -> None:
    asked = ask(max_body=1000)
    large = b'{"recording": "' + b"x" * 2000 + b'"}'
    assert asked("/api/v1/jobs", "POST", content=large, headers=JSON).status_code == 413

    async def pieces() -> Any:
        for _ in range(100):
            yield b" " * 100

    answer = asked("/api/v1/jobs", "POST", content=pieces(), headers=JSON)
    assert answer.request.headers.get("transfer-encoding") == "chunked"
    assert answer.status_code == 413


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "OPTIONS", "PROPFIND", "PUT", "PATCH"])
def test_other_methods_are_refused(ask: Ask, method: str) -> None:
    assert ask()("/api/v1/recordings", method, headers=JSON).status_code == 405


def test_too_long_url_is_refused(ask: Ask) -> None:
    assert ask()("/api/v1/jobs?after=" + "x" * 5000).status_code == 400


TRAVERSALS = [
    "/page/../settings.py",
    "/page/%2e%2e/settings.py",
    "/page/..%2fsettings.py",
    "/page//etc/passwd",
    "/page/%2fetc%2fpasswd",
    "/../etc/passwd",
    "/api/v1/recordings/../../etc/passwd",
    "/api/v1/recordings/..%2f..%2fetc",
    "/api/v1/recordings/%2e%2e",
    "/api/v1/recordings/~digits",
    "/api/v1/recordings/digits~..",
    "/api/v1/recordings/digits~recording",
    "/api/v1/recordings/digits%00",
    "/api/v1/recordings/digits/cases/..%2f..%2ftruth/x",
    "/api/v1/recordings/digits/cases/..%5c../x/images/0.png",
    "/api/v1/jobs/..%2f..%2ftoken/preview",
    "/api/v1/jobs/%2e%2e%2ftoken/preview/0.png",
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_path_traversal_is_refused(ask: Ask, path: str) -> None:
    answer = ask(truth="own")(path)
    assert answer.status_code in (400, 404)
    assert "root:" not in answer.text


def test_headers_are_on_every_answer(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ask(max_body=100)

    def broken() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(asked.components.metrics, "read", broken)
    answers = {
        200: asked("/api/v1/recordings"),
        304: asked("/page/main.js", headers={"If-None-Match": asked("/page/main.js").headers["etag"]}),
        400: asked("/", headers={"Host": "evil.example"}),
        404: asked("/nothing"),
        405: asked("/api/v1/recordings", "TRACE"),
        413: asked("/api/v1/jobs", "POST", content=b"x" * 200, headers=JSON),
        415: asked("/api/v1/jobs", "POST", content=b"x"),
        422: asked("/api/v1/jobs?limit=x"),
        500: asked("/metrics"),
    }
    for status, answer in answers.items():
        assert answer.status_code == status
        assert {name.lower() for name in SECURITY_HEADERS} <= set(answer.headers), status
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "server" not in answer.headers
        assert "a bug" not in answer.text
    assert answers[200].headers["cache-control"] == "private, no-cache"
    assert answers[404].headers["cache-control"] == "no-store"


async def answer_forever(scope: Any, receive: Any, send: Any) -> None:
    """Send a response without end."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": b"x", "more_body": True})


async def wait_forever(*message: Any) -> Any:
    await asyncio.sleep(60)


async def disconnect() -> Any:
    return {"type": "http.disconnect"}


def ask_guard(root: Path, method: str, receive: Any, send: Any) -> None:
    """Make a request to `answer_forever` behind a guard that waits 0.05 seconds for the client."""
    guard = Guard(answer_forever, patience=0.05)
    components = SimpleNamespace(settings=ServiceSettings(root=root), keys=None)
    served_app = SimpleNamespace(state=SimpleNamespace(components=components))
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": method,
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
        "headers": headers,
        "app": served_app,
    }
    asyncio.run(guard(scope, receive, send))


def test_stalled_client_is_disconnected(tmp_path: Path) -> None:
    started = time.monotonic()
    ask_guard(tmp_path, "POST", wait_forever, wait_forever)
    ask_guard(tmp_path, "GET", wait_forever, wait_forever)
    assert time.monotonic() - started < 5


def test_request_that_arrives_too_slowly_is_answered_with_408(tmp_path: Path) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    ask_guard(tmp_path, "POST", wait_forever, send)
    start, body = sent
    assert start["status"] == 408
    names = {name.decode().lower() for name, _ in start["headers"]}
    assert (b"Connection", b"close") in start["headers"]
    assert {name.lower() for name in SECURITY_HEADERS} <= names
    assert "0.05 seconds" in json.loads(body["body"])["error"]["message"]


@pytest.mark.parametrize(
    ("method", "receive", "reason"),
    [("GET", wait_forever, "given up, because the client received it too slowly"), ("POST", disconnect, "disconnected")],
)
def test_log_states_why_a_request_was_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, receive: Any, reason: str
) -> None:
    with caplog.at_level("INFO", "attacker.service"):
        ask_guard(tmp_path, method, receive, wait_forever)
    (message,) = caplog.messages
    assert reason in message
