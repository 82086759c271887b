"""A fake service with constructed responses, for what real runs do not give: hostile names, hundreds of rounds, rare failures."""

import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

PAGE = Path(__file__).parents[2] / "attacker" / "service" / "web"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html; charset=utf-8"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEALTH = {"status": "ok", "version": "1", "token": False}
JOBS_REFUSED = (422, {"error": {"message": "steps must be at least 1, not -5", "field": "arguments.steps", "known": None}})


class Fake:
    """State of a fake service.

    `answers` holds a response, or a function of the query, by path below /api/v1/; `refusals` holds (status, response) by
    path; `posted` lists the requests that were sent by POST; `before_stream` is called before a stream of events is answered.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"recordings": listed([]), "jobs": listed([]), "attacks": listed([]), "health": HEALTH}
        self.refusals: dict[str, tuple[int, Any]] = {}
        self.posted: list[tuple[str, Any]] = []
        self.streams: list[queue.Queue[bytes]] = []
        self.before_stream: Callable[[], Any] = lambda: None
        self.address = ""

    def tell(self, name: str, data: Any) -> None:
        """Send an event to every open page."""
        for stream in list(self.streams):
            stream.put(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())


def listed(items: list[Any]) -> dict[str, Any]:
    return {"items": items, "next": None}


def recording(id: str, **changes: Any) -> dict[str, Any]:
    """Return the summary of a recording."""
    made = {
        "id": id,
        "name": id,
        "model": "lenet_cpl",
        "data": {"shape": [3, 32, 32], "num_classes": 10, "is_image": True},
        "defense": "",
        "gradient": "plain",
        "network": "",
        "inputs": "",
        "secure_aggregation": False,
        "training": {"steps": 1, "epochs": None, "batch_size": 1, "learning_rate": 0.01},
        "rounds": 3,
        "last_round": 3,
        "clients": 2,
        "observations": 6,
        "updated": "2026-01-01T00:00:00Z",
        "truth": True,
        "trouble": [],
    }
    return {**made, **changes}


def job(id: str, **changes: Any) -> dict[str, Any]:
    spec = {
        "recording": "big",
        "attack": "cpl",
        "arguments": {},
        "rounds": "all",
        "clients": [],
        "seed": 0,
        "null": True,
        "priority": 0,
    }
    made = {
        "id": id,
        "spec": spec,
        "state": "queued",
        "attempts": 0,
        "crashes": 0,
        "origin": "request",
        "created": "2026-01-01T00:00:00Z",
        "started": None,
        "ended": None,
        "progress": {"share": 0, "words": ""},
        "error": None,
        "result": None,
    }
    return {**made, **changes}


def grid(clients: list[str], rounds: int) -> dict[str, Any]:
    """Return a full grid whose leakage decreases with the rounds."""
    cells = [
        {
            "client": client,
            "round": round,
            "status": "complete",
            "cases": [f"{round:05d}-{client}"],
            "attack": "cpl-1",
            "leak": (at + 1) / len(clients) * (1 - round / rounds),
            "success": None,
            "psnr": 20.0,
            "confidence": 0.5,
            "state": "done",
        }
        for round in range(1, rounds + 1)
        for at, client in enumerate(clients)
    ]
    return {"clients": clients, "rounds": list(range(1, rounds + 1)), "cells": cells}


@contextmanager
def served(fake: Fake) -> Iterator[Fake]:
    """Serve the page and the responses on a free port within the context."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"fake": fake}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    fake.address = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        yield fake
    finally:
        for stream in fake.streams:
            stream.put(b"")
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    fake: Fake

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        if path.startswith("/api/v1/") and path.endswith("events"):
            self._stream()
        elif path.startswith("/api/v1/"):
            self._answer(path.removeprefix("/api/v1/"), dict(parse_qsl(parts.query)))
        else:
            self._file(path)

    def do_POST(self) -> None:
        path = unquote(self.path).removeprefix("/api/v1/")
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.fake.posted.append((path, body))
        self._answer(path if path in self.fake.refusals else f"POST {path}", {})

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log."""

    def _answer(self, path: str, query: dict[str, str]) -> None:
        if path in self.fake.refusals:
            status, content = self.fake.refusals[path]
        elif path in self.fake.answers:
            found = self.fake.answers[path]
            status, content = 200, found(query) if callable(found) else found
        else:
            status, content = 404, {"error": {"message": f"no {path}", "field": None, "known": None}}
        self._send(status, "application/json", json.dumps(content).encode())

    def _file(self, path: str) -> None:
        file = PAGE / "index.html" if path == "/" else PAGE / path.removeprefix("/page/")
        if not file.is_file():
            self._send(404, "text/plain", b"none")
            return
        self._send(200, TYPES[file.suffix], file.read_bytes())

    def _send(self, status: int, type: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(content)

    def _stream(self) -> None:
        self.fake.before_stream()
        mine: queue.Queue[bytes] = queue.Queue()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.fake.streams.append(mine)
        with suppress(ConnectionError):
            self.wfile.write(b'event: hello\ndata: {"resumed": false}\n\n')
            while chunk := mine.get():
                self.wfile.write(chunk)
                self.wfile.flush()
        self.fake.streams.remove(mine)
