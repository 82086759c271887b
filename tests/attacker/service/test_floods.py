"""Tests that one client cannot block others: neither by expensive requests nor by many idle connections."""

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from attacker.service.server import MAX_CONNECTIONS, format_address, make_server, open_listener

Ask = Callable[..., Any]
MAX_TURN_SECONDS = 0.05
"""Most seconds of computation of one callback of the event loop."""
IDLE = 520


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """List of the seconds that each callback of an event loop computed, in time of the thread, not of the clock.

    Existing objects are frozen for the garbage collector, as in the service: to collect all of PyTorch's takes 0.4 seconds.
    """
    found: list[float] = []
    gc.collect()
    gc.freeze()
    run = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        found.append(time.thread_time() - began)

    monkeypatch.setattr(asyncio.Handle, "_run", measured)
    yield found
    gc.unfreeze()


WIDE = ",".join(["1-999999"] * 31)
LARGEST = 60_000
SPEC = {"recording": "digits", "attack": "exact"}
BODIES: dict[str, bytes] = {
    "all rounds many times": json.dumps({**SPEC, "rounds": WIDE}).encode(),
    "many rounds": json.dumps({**SPEC, "rounds": ",".join(f"{n}-999999" for n in range(100_000, 100_031))}).encode(),
    "more rounds than may be": json.dumps({**SPEC, "rounds": "1-10000000000"}).encode(),
    "many clients": json.dumps({**SPEC, "clients": [f"client-{n}" for n in range(1000)]}).encode(),
    "many arguments": json.dumps({**SPEC, "arguments": {f"a{n}": n for n in range(50)}}).encode(),
    "large numbers": json.dumps({**SPEC, "arguments": {"steps": 10**300, "restarts": 10**300}}).encode(),
    "a deep document": b"[" * (LARGEST // 2) + b"]" * (LARGEST // 2),
    "a long name": json.dumps({**SPEC, "recording": "x" * LARGEST}).encode(),
    "a long attack": json.dumps({**SPEC, "attack": "y" * LARGEST}).encode(),
    "many fields": json.dumps({f"f{n}": n for n in range(4000)}).encode(),
    "long digits": b'{"seed": ' + b"9" * 4000 + b"}",
}


@pytest.mark.parametrize("body", BODIES)
def test_job_requests_do_not_block_the_event_loop(ask: Ask, turns: list[float], body: str) -> None:
    asked = ask()
    asked("/api/v1/jobs", "POST", json={"recording": "none", "attack": "cpl"})  # so that modules are loaded
    turns.clear()
    answer = asked("/api/v1/jobs", "POST", content=BODIES[body], headers={"Content-Type": "application/json"})
    assert answer.status_code in (201, 400, 422)
    assert turns
    assert max(turns) < MAX_TURN_SECONDS, f"{max(turns) * 1e3:.0f} ms"


def test_lists_do_not_block_the_event_loop(ask: Ask, turns: list[float]) -> None:
    asked = ask(truth="own")
    for path in ("recordings", "recordings/digits/grid", "recordings/digits/cases", "recordings/digits/observations", "attacks"):
        asked.json(path)
    assert max(turns) < MAX_TURN_SECONDS


@pytest.fixture
def served(ask: Ask) -> Iterator[str]:
    """Address of the application, served on a socket."""
    asked = ask(port=0)
    listener = open_listener(asked.components.settings)
    made = make_server(asked.app, asked.components.settings)
    thread = threading.Thread(target=made.run, args=([listener],))
    thread.start()
    while not made.started:
        time.sleep(0.01)
    yield format_address(listener, asked.components.settings)
    made.should_exit = True
    thread.join(30)
    listener.close()


@pytest.mark.parametrize(
    "head", [b"", b"GET / HTTP/1.1\r\n", b"POST /api/v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"]
)
def test_idle_connections_do_not_block_others(served: str, head: bytes) -> None:
    """The connections send nothing, half of a request's header, or a header without the announced body."""
    if head.startswith(b"POST"):
        head += b"Content-Type: application/json\r\n\r\n"
    place = httpx.URL(served)
    assert IDLE > MAX_CONNECTIONS
    with ExitStack() as held:
        for _ in range(IDLE):
            connection = held.enter_context(socket.create_connection((place.host, place.port), timeout=30))
            if head:
                connection.sendall(head)
        for _ in range(3):
            assert httpx.get(f"{served}api/v1/health", timeout=10).status_code == 200
