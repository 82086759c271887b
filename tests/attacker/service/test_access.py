"""Tests of access to the service: token, sessions, host names, origins, sizes of requests, and headers of answers."""

import asyncio
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from attacker.service import sessions
from attacker.service.authorisation import is_loopback_name, is_own, parse_hostname, read_token
from attacker.service.http.app import make_components
from attacker.service.http.middleware import TOKEN_FREE_REQUESTS, Guard, make_cookie_name
from attacker.service.sessions import MAX_SESSIONS, SESSION_SECONDS, Keys
from attacker.service.settings import ServiceSettings

Ask = Callable[..., Any]
JSON = {"Content-Type": "application/json"}
EXAMPLES = {"id": "digits", "source": "exact", "case": "00001-a", "n": "0"}


def routes(asked: Any) -> list[tuple[str, str]]:
    """Return method and path of all routes in the OpenAPI document."""
    paths = asked.app.openapi()["paths"]
    return [(method.upper(), path.format(**EXAMPLES)) for path, methods in paths.items() for method in methods]


def test_routes_need_the_token_except_health_and_session(ask: Ask) -> None:
    asked = ask(token=True)
    found = routes(asked)
    assert len(found) > 20
    for method, path in found:
        answer = asked(path, method, headers=JSON if method != "GET" else {})
        assert (answer.status_code == 401) == ((method, path) not in TOKEN_FREE_REQUESTS), (method, path)
    for path in ("/metrics", "/api/v1/openapi.json", "/api/v1/none", "/api/v2/recordings", "/api/v1//recordings"):
        assert asked(path).status_code == 401


@pytest.mark.parametrize(
    "wrong", ["", "Bearer", "Bearer wrong", "Basic {token}", "bearer x{token}", "{token}", "Bearer {token} {token}"]
)
def test_wrong_token_is_refused(ask: Ask, wrong: str) -> None:
    asked = ask(token=True)
    header = wrong.format(token=asked.components.keys.token)
    answer = asked("/api/v1/recordings", headers={"Authorization": header})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert asked.components.keys.token not in answer.text


def test_token_and_session_cookie_give_access(ask: Ask) -> None:
    asked = ask(token=True)
    token = asked.components.keys.token
    assert asked("/api/v1/recordings", headers={"Authorization": f"Bearer {token}"}).status_code == 200
    assert asked("/api/v1/session", "POST", json={"token": "wrong"}).status_code == 401
    opened = asked("/api/v1/session", "POST", json={"token": token})
    assert opened.status_code == 204
    cookie = opened.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert token not in cookie
    value = cookie.split(";")[0]
    assert asked("/api/v1/recordings", headers={"Cookie": f"a=b; {value}"}).status_code == 200
    assert asked("/api/v1/recordings", headers={"Cookie": value[:-1]}).status_code == 401
    other = asked("/api/v1/session", "POST", json={"token": token}).headers["set-cookie"].split(";")[0]
    closed = asked("/api/v1/session", "DELETE", headers={**JSON, "Cookie": value})
    assert "Max-Age=0" in closed.headers["set-cookie"]
    assert asked("/api/v1/recordings", headers={"Cookie": value}).status_code == 401, "a kept cookie opens nothing any more"
    assert asked("/api/v1/recordings", headers={"Cookie": other}).status_code == 200


def test_sessions_and_their_ends_persist_over_restarts(tmp_path: Path) -> None:
    keys = Keys("t" * 32, tmp_path / "sessions.json")
    stays, ends = keys.open_session(), keys.open_session()
    keys.close(ends)
    keys.close("nonsense")
    assert stays.encode() not in (tmp_path / "sessions.json").read_bytes()
    again = Keys("t" * 32, tmp_path / "sessions.json")
    assert (again.is_open(stays), again.is_open(ends)) == (True, False)
    assert not Keys("u" * 32, tmp_path / "sessions.json").is_open(stays), "another token ends all sessions"
    for harm in ("", "[]", "[" * 100_000, '{"a": "b"}'):
        (tmp_path / "sessions.json").write_text(harm)
        assert not Keys("t" * 32, tmp_path / "sessions.json").is_open(stays)


def test_the_oldest_of_too_many_sessions_ends() -> None:
    keys = Keys("t" * 32)
    cookies = [keys.open_session() for _ in range(MAX_SESSIONS + 1)]
    assert not keys.is_open(cookies[0])
    assert all(map(keys.is_open, cookies[1:]))


def test_stream_ends_with_its_session(ask: Ask) -> None:
    asked = ask(token=True)
    keys, sent = asked.components.keys, []
    cookie = keys.open_session()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(10):
            if number == 3:
                keys.close(cookie)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    async def send(message: Any) -> None:
        sent.append(message["type"])

    name = make_cookie_name(asked.components.settings, asked.components.keys)
    headers = [(b"host", b"localhost"), (b"cookie", f"{name}={cookie}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/api/v1/events", "query_string": b"", "headers": headers, "app": asked.app}
    asyncio.run(Guard(app)(scope, None, send))
    assert sent == ["http.response.start", *["http.response.body"] * 3]


def test_services_on_one_host_have_different_cookie_names(tmp_path: Path) -> None:
    first, second = (make_cookie_name(ServiceSettings(root=tmp_path), Keys(letter * 32)) for letter in "ab")
    assert first != second


def test_token_in_a_url_is_not_accepted(ask: Ask) -> None:
    asked = ask(token=True)
    assert asked(f"/api/v1/recordings?token={asked.components.keys.token}").status_code == 401


def test_page_needs_no_token_and_is_not_private(ask: Ask) -> None:
    asked = ask(token=True)
    page = asked("/")
    assert page.status_code == 200
    assert "digits" not in page.text
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]


def test_cookie_with_tls_is_secure_and_for_this_host(ask: Ask, tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    asked = ask(token=True, certfile=tmp_path / "cert.pem", keyfile=tmp_path / "key.pem")
    cookie = asked("/api/v1/session", "POST", json={"token": asked.components.keys.token}).headers["set-cookie"]
    assert cookie.startswith("__Host-")
    assert "Secure" in cookie.split("; ")


def test_session_expires_and_cannot_be_forged() -> None:
    keys = Keys(secrets.token_urlsafe(32))
    cookie = keys.open_session(now=1000.0)
    assert keys.is_open(cookie, now=2000.0)
    assert not keys.is_open(cookie, now=1000.0 + SESSION_SECONDS + 1)
    assert not Keys(secrets.token_urlsafe(32)).is_open(cookie, now=2000.0)
    until, rest = cookie.split(".", 1)
    assert not keys.is_open(f"{int(until) + 1}.{rest}", now=2000.0)


@given(st.text(max_size=80))
def test_no_text_is_a_session_or_the_token(text: str) -> None:
    keys = Keys("t" * 32)
    assert not keys.is_token(text)
    assert not keys.is_open(text)


def test_secrets_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, object]] = []

    def compare(a: bytes, b: bytes) -> bool:
        seen.append((a, b))
        return False

    monkeypatch.setattr(sessions.secrets, "compare_digest", compare)
    keys = Keys("t" * 32)
    assert not keys.is_token("t" * 32)
    assert not keys.is_open(keys.open_session())
    assert len(seen) == 2
    assert all(isinstance(one, bytes) for pair in seen for one in pair)


def test_token_is_created_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "token"
    token = read_token(path)
    assert len(token) >= 43
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_token(path) == token
    assert read_token(tmp_path / "other") != token


@pytest.mark.parametrize(
    "harm", [lambda path: path.chmod(0o644), lambda path: path.write_text("short\n"), lambda path: path.write_text("")]
)
def test_readable_or_short_token_is_refused(tmp_path: Path, harm: Callable[[Path], Any]) -> None:
    path = tmp_path / "token"
    read_token(path)
    harm(path)
    with pytest.raises(ValueError, match="delete it"):
        read_token(path)


def test_token_can_be_switched_off_on_loopback_only(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        assert ServiceSettings(root=tmp_path, host=host).token
        assert not ServiceSettings(root=tmp_path, host=host, token=False).token
    for host in ("0.0.0.0", "::", "192.168.1.5", "attacker.example", "127.0.0.1.example"):
        assert ServiceSettings(root=tmp_path, host=host).token
        with pytest.raises(ValueError, match="--no-token is allowed only with an address of this machine"):
            ServiceSettings(root=tmp_path, host=host, token=False)


def test_token_is_required_by_default(root: Path, application: FastAPI, ask_of: Ask) -> None:
    application.state.components = make_components(ServiceSettings(root=root, workers=0))
    asked = ask_of(application)
    assert asked("/api/v1/recordings").status_code == 401
    assert asked.json("health")["token"] is True
    asked.components.queue.close()


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "localhost@evil.example", "a b"]
)
def test_other_host_names_are_refused(ask: Ask, host: str) -> None:
    asked = ask()
    for method, path in [*routes(asked), ("GET", "/"), ("GET", "/metrics")]:
        answer = asked(path, method, headers={"Host": host, **JSON})
        assert answer.status_code == 400, (method, path)


def test_loopback_names_are_recognised() -> None:
    assert all(map(is_loopback_name, ["localhost", "localhost:80", "LOCALHOST.", "127.0.0.1:8600", "[::1]:8600", "[::1]"]))
    assert not any(map(is_loopback_name, ["10.0.0.1", "[::2]", "localhost:x", "[::1", "::1]", "localhost:", ".", "local host"]))


@given(st.text(max_size=50))
def test_no_text_makes_a_host_header_fail(text: str) -> None:
    name = parse_hostname(text)
    assert name is None or (name in text and len(name) > 0)
    is_loopback_name(text)
    is_own(text, text)


def test_state_folder_is_private(ask: Ask, root: Path) -> None:
    ask(token=True)
    for path in (root / ".attacker", root / ".attacker" / "token"):
        assert os.stat(path).st_mode & 0o077 == 0
