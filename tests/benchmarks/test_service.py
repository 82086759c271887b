"""Tests of the service benchmark: which jobs count as lost, which workers it may kill, and errors of its clients."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import service
from support.service.client import load


def job(id: str, state: str, crashes: int = 0) -> dict[str, Any]:
    result = {"attacks": [{"source": f"exact-{id}"}]} if state == "done" else None
    return {
        "id": id,
        "state": state,
        "crashes": crashes,
        "attempts": 1,
        "ended": None,
        "spec": {"recording": "tiny"},
        "result": result,
    }


def answer(root: Path, id: str, files: int) -> None:
    folder = root / "tiny" / "reconstructions" / f"exact-{id}"
    folder.mkdir(parents=True)
    for number in range(files):
        (folder / f"{number}.safetensors").touch()


def test_lost_jobs_are_those_without_complete_results(tmp_path: Path) -> None:
    jobs = [job("a", "done"), job("b", "done"), job("c", "set_aside", 3), job("d", "failed"), job("e", "queued")]
    answer(tmp_path, "a", service.NUM_TINY_CLIENTS)
    answer(tmp_path, "b", service.NUM_TINY_CLIENTS - 1)
    assert service.count_lost(tmp_path, [*"abcdef"], jobs) == len("bdef")


def test_no_worker_is_killed_after_a_crash_of_a_waiting_job() -> None:
    assert service.is_kill_allowed([job("a", "running"), job("b", "queued")])
    assert not service.is_kill_allowed([job("a", "queued", 1), job("b", "running")])


class FakeService:
    """A fake service in which all jobs but one are set aside, and none changes any more."""

    root = Path("/nowhere")

    def ask(self, path: str, body: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return {"id": str(self.count)}

    def list_items(self, path: str) -> list[dict[str, Any]]:
        return [job(str(number), "set_aside" if number > 1 else "failed", 3) for number in range(1, self.count + 1)]


def test_measurement_ends_when_no_job_can_change() -> None:
    row = service.measure_durability(FakeService(), 5, seed=0)
    assert row["seconds"] < 5
    assert (row["set_aside"], row["lost"]) == (4, 1)


class Answers(BaseHTTPRequestHandler):
    """A server that answers every path but /good with status 500."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/good" else 500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_load_reports_an_error_of_any_client() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_port}"
        try:
            assert load(place, "", ["/good"], seconds=0.2, rate=None)[0]
            with pytest.raises(RuntimeError, match="answered /bad with status 500"):
                load(place, "", ["/good", "/good", "/good", "/bad"], seconds=0.2, rate=None)
        finally:
            server.shutdown()


def test_output_of_a_failed_federation_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = tmp_path / "python"
    federation.write_text("#!/bin/sh\necho 2 replies failed >&2\nexit 1\n")
    federation.chmod(0o700)
    monkeypatch.setattr(service.sys, "executable", str(federation))
    (tmp_path / "root").mkdir()
    monkeypatch.setattr(FakeService, "list_items", lambda self, path: [])
    with pytest.raises(RuntimeError, match="exited with status 1; its output ends with\n2 replies failed"):
        service.measure_lag(FakeService(), tmp_path / "root", 3)
