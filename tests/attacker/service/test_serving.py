"""Tests of the service as a process: its printed address, streams of events, ending by a signal, and refused settings."""

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from changed_recordings import add_round
from command_line import run_attacker

from attacker.service.background import BackgroundWork
from attacker.service.http.app import create_app, make_components
from attacker.service.server import make_server, open_listener
from attacker.service.settings import ServiceSettings
from attacker.service.state_folder import claim_folder
from fedsim.recording.files import hold_lock

TIME_LIMIT = 120.0
"""Time limit in seconds, generous for busy machines."""


class Served(NamedTuple):
    process: subprocess.Popen[str]
    url: str


@pytest.fixture
def serve(root: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Function that starts `attacker serve` on the root; the processes are killed after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*options: str) -> Served:
        command = [str(Path(sys.executable).with_name("attacker")), "serve", str(root), "--port", "0", "--workers", "0", *options]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        processes.append(process)
        return Served(process, process.stdout.readline().strip())

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def events(stream: httpx.Response) -> Iterator[tuple[str, Any]]:
    kind = ""
    for line in stream.iter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value)


def raw(url: str, content: bytes) -> bytes:
    """Send bytes to the service, and return all that it sends until it closes the connection."""
    host, port = re.match(r"http://([^:]+):(\d+)", url).groups()
    with socket.create_connection((host, int(port)), timeout=TIME_LIMIT) as connection:
        connection.sendall(content)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


def test_events_are_streamed_and_the_service_ends_with_listeners(
    serve: Callable[..., Served], root: Path, tmp_path: Path
) -> None:
    """The service runs without a token, and warns at the start what that means."""
    process, url = serve("--no-token", "--truth", "own")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
    assert httpx.get(f"{url}api/v1/recordings").status_code == 200
    log_text = " ".join((tmp_path / "log").read_text().split())
    assert "every user and program on this machine can see all results, private originals among them," in log_text
    with httpx.Client(base_url=url, timeout=TIME_LIMIT) as client, client.stream("GET", "/api/v1/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        stream_of_events = events(stream)
        assert next(stream_of_events) == ("hello", {"resumed": False})
        add_round(root / "digits" / "recording", 3)
        assert ("digits", 3) in ((one["id"], one["last_round"]) for kind, one in stream_of_events if kind == "recording")
        job = client.post("/api/v1/jobs", json={"recording": "digits", "attack": "cpl"}).json()
        assert ("job", job["id"]) in ((kind, one.get("id")) for kind, one in stream_of_events if kind == "job")
        with client.stream("GET", f"/api/v1/jobs/{job['id']}/events") as of_job:
            changes = events(of_job)
            assert next(changes)[1]["state"] == "queued"
            client.post(f"/api/v1/jobs/{job['id']}/cancel", json={})
            assert [one["state"] for _, one in changes] == ["cancelled"]
        shutil.rmtree(root / "digits")
        assert ("removed", {"id": "digits"}) in ((kind, one) for kind, one in stream_of_events if kind == "removed")
        large = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n"
        for nonsense in (b"nonsense\r\n\r\n", large):
            answer = raw(url, nonsense)
            assert answer.startswith(b"HTTP/1.1 400")
            assert b"content-security-policy: default-src 'none'" in answer.lower()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIME_LIMIT) == 0
        assert time.monotonic() - began < 5 + 0.2 * TIME_LIMIT  # five seconds on an idle machine
        assert list(stream_of_events) == []


def test_loaded_objects_are_frozen_for_the_garbage_collector() -> None:
    """A collection over all objects of the imported modules would delay every answer."""
    code = """
import gc
from attacker.service import server
from attacker.service.http import app
loaded = len(gc.get_objects())
server._freeze_objects()
print(loaded, len(gc.get_objects()))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=TIME_LIMIT)
    loaded, left = map(int, found.stdout.split())
    assert loaded > 50_000 > 20 * left


def test_another_service_in_the_same_folder_is_refused(root: Path) -> None:
    with hold_lock(claim_folder(root / ".attacker") / "service.lock"):
        stream_of_events = run_attacker("serve", root, "--port", "0", "--workers", "0", "--no-token")
    assert (stream_of_events.exit_code, stream_of_events.stdout) == (2, "")
    assert "another process is working there" in stream_of_events.stderr


def test_the_server_leaves_log_handlers_of_other_packages_open(root: Path) -> None:
    """A handler of absl, which accounting of privacy imports, closes its stream with itself: stderr at the time of the import."""

    class Handler(logging.Handler):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True
            super().close()

    handler, settings = Handler(), ServiceSettings(root=root, workers=0)
    application = create_app(settings)
    try:
        make_server(application, settings)
        assert not handler.is_closed
    finally:
        handler.close()
        application.state.components.queue.close()


def test_port_in_use_is_refused_with_advice(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ValueError, match="--port 0"):
        open_listener(ServiceSettings(root=tmp_path, port=taken.getsockname()[1]))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"root": Path("/nowhere")}, "mkdir"),
        ({"certfile": Path("pyproject.toml")}, "--keyfile"),
        ({"rules": Path("/nowhere")}, "--rules"),
        ({"truth": (Path("/nowhere"),)}, "--truth"),
        ({"workers": -1}, "--workers"),
        ({"job_seconds": 0.0}, "--job-seconds"),
        ({"job_seconds": float("nan")}, "--job-seconds must be positive"),
        ({"job_megabytes": 0}, "--job-megabytes must be positive"),
        (
            {"job_megabytes": 100, "ray": "10.0.0.1:6379"},
            "--job-megabytes cannot be applied with --ray 10.0.0.1:6379: .* use --ray local",
        ),
        ({"job_megabytes": 100, "ray": "auto"}, "--job-megabytes cannot be applied with --ray auto"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServiceSettings(**{"root": tmp_path, **wrong})


def test_memory_is_measured_without_a_shared_cluster(tmp_path: Path) -> None:
    for ray in (None, "local"):
        assert ServiceSettings(root=tmp_path, job_megabytes=100, ray=ray).measures


def test_cpu_budget_is_refused_with_a_shared_cluster(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rule = '[[rule]]\nname = "{}"\nattack = "exact"\n'
    rules.write_text(rule.format("a") + rule.format("b") + "budget = { cpu_seconds = 9 }\n")
    for ray, refused in (("auto", True), ("local", False), (None, False)):
        components = make_components(ServiceSettings(root=tmp_path, rules=rules, ray=ray))
        words = rf"rules.toml: rule 'b': budget.cpu_seconds cannot be applied with --ray {ray}: .* use --ray local"
        with pytest.raises(ValueError, match=words) if refused else nullcontext():
            BackgroundWork(components)
        components.queue.close()


def test_printed_link_holds_the_token_that_is_required(serve: Callable[..., Served], root: Path, tmp_path: Path) -> None:
    _, link = serve("--token")
    url, _, token = link.partition("#token=")
    assert token == (root / ".attacker" / "token").read_text().strip()
    with httpx.Client(base_url=url, timeout=TIME_LIMIT) as client:
        assert client.get("/api/v1/recordings").status_code == 401
        assert client.post("/api/v1/session", json={"token": token}).status_code == 204
        assert client.get("/api/v1/recordings").status_code == 200
        kept = dict(client.cookies)
        assert client.delete("/api/v1/session").status_code == 204
        client.cookies.update(kept)
        assert client.get("/api/v1/recordings").status_code == 401
    assert "keep it to yourself" in (tmp_path / "log").read_text()
