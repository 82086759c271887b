"""`attacker serve` in a thread of the tests, until a page starts it again or ends, and the page's curl commands to it."""

import gc
import shutil
import subprocess
import threading
import time
from typing import Any

import pytest
import typer.main

from attacker.cli import app
from attacker.service.server import UvicornServer

DOCUMENTED_ADDRESS = "localhost:8600"


class StartedService:
    """The service that a page has started, on a free port. Only one runs at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._servers: list[UvicornServer] = []
        self._ended: list[object] = []
        self._thread: threading.Thread | None = None
        make = UvicornServer.__init__

        def keep(server: UvicornServer, *arguments: Any, **options: Any) -> None:
            make(server, *arguments, **options)
            self._servers.append(server)

        monkeypatch.setattr(UvicornServer, "__init__", keep)

    def start(self, words: list[str]) -> tuple[int, str]:
        """Stop a running service and start one. Return status 0 as soon as it answers, or 1 with the reason if it ends."""
        self.stop()
        command = typer.main.get_command(app)

        def serve() -> None:
            self._ended.append(command.main([*words, "--port", "0"], standalone_mode=False))

        self._thread = threading.Thread(target=serve)
        self._thread.start()
        while not (self._servers and self._servers[-1].started) and self._thread.is_alive():
            time.sleep(0.01)
        return (0, "") if self._thread.is_alive() else (1, f"the service ended: {self._ended}")

    def ask(self, words: list[str]) -> tuple[int, str]:
        """Run curl with the service's port; return status and output. A stream that never ends is read for three seconds."""
        if shutil.which("curl") is None:
            return 0, ""
        port = self._servers[-1].servers[0].sockets[0].getsockname()[1]
        words = [word.replace(DOCUMENTED_ADDRESS, f"localhost:{port}") for word in words]
        done = subprocess.run(["curl", "--fail-with-body", "--max-time", "3", *words[1:]], capture_output=True, text=True)
        streams = "-N" in words and done.returncode == 28
        return 0 if streams else done.returncode, done.stdout

    def stop(self) -> None:
        """End the service as Ctrl-C does. Raises AssertionError if it does not end."""
        if self._thread is None:
            return
        for server in self._servers:
            server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._servers.clear()
        self._thread = None
        gc.unfreeze()
