"""Requests to a SuperLink (Flower's relay) through Flower's commands: register clients; run an app, find its status, stop it."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from fedsim.deployment.commands import Link
from fedsim.deployment.processes import RUNNER_NAME, Processes
from fedsim.recording.files import make_private
from fedsim.server.outcome import FAILURE_PREFIX

CONNECTION_NAME = "federation"
APP_PROJECT = {
    "project": {"name": "fedleak-federation", "version": "0.1.0"},
    "tool": {
        "flwr": {
            "app": {
                "publisher": "fedleak",
                "components": {"serverapp": "fedsim.engine.flower_app:server", "clientapp": "fedsim.engine.flower_app:client"},
                "config": {
                    **dict.fromkeys(("experiment", "settings", "out", "public"), ""),
                    "resume": False,
                    "device": "auto",
                    "threads": 1,
                },
            }
        }
    },
}
"""pyproject.toml of the app that is submitted to the SuperLink. It only names the apps and contains no code.

Each party imports the named apps from its own installation and runs no code that others send.
"""
COLOUR_CODES = re.compile(r"\x1b\[[0-9;]*m")
OnWords = Callable[[str], None]
WARNING_LINE = re.compile(rf"^WARNING\W+(\d+ of \d+ (?:clients|replies) are .+|{FAILURE_PREFIX}.+)$")
"""Warnings of the server in the log of a run, from `fedsim.server.attendance` and `fedsim.server.outcome`."""
SERVER_ERROR_PREFIX = "ServerApp failed with exception: "
"""Beginning of Flower's message about a run whose server failed."""
SILENT_END_REASON = "the server's process exited without a message; see its log, start it again and continue with --resume"
ANSWER_SECONDS = 300.0
"""Seconds to wait for a SuperLink that does not answer; a killed one continues from its database when restarted."""
COMMAND_SECONDS = 120.0
"""Time limit of one of Flower's commands, in seconds."""


class NotReached(RuntimeError):
    """Error for a SuperLink that does not answer or refuses a request; the message contains the end of what Flower printed."""


class RunFailed(RuntimeError):
    """Error for a run that ended without completing.

    status:          Flower's status of the run, such as "finished:failed".
    detail:          the reason; "" if unknown.
    was_unreachable: whether the SuperLink failed to answer an earlier request for the status.
    """

    def __init__(self, status: str, detail: str, *, was_unreachable: bool = False) -> None:
        super().__init__(f"the run ended as {status}" + (f": {detail}" if detail else ""))
        self.status, self.detail, self.was_unreachable = status, detail, was_unreachable


def enrol(link: Link, keys: Path, *, home: Path, prefix: Sequence[str] = ()) -> int:
    """Register the public keys `*.pub` in the folder `keys` at the SuperLink and return the number of these files.

    Keys that are registered already are counted too.

    home:   folder for Flower's configuration.
    prefix: words before Flower's command that run it, for example, in another network.
    Raises ValueError if there are no keys, and NotReached if one cannot be registered.
    """
    found = sorted(keys.glob("*.pub"))
    if not found:
        raise ValueError(f"{keys} holds no public keys of clients (*.pub); create them with fedsim prepare or fedsim keys")
    _configure(home, link)
    command = [*prefix, sys.executable, "-m", "fedsim.deployment.enrolment", CONNECTION_NAME, *map(str, found)]
    done = subprocess.run(command, env=_make_environment(home), capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise NotReached(
            f"the SuperLink at {link.address} did not register the public keys in {keys}; correct the error that Flower "
            f"reports, and enrol again. Flower's output: {_find_last_lines(done.stdout + done.stderr)}"
        )
    return len(found)


@dataclass
class SubmittedRun:
    """A run on a SuperLink, submitted by the command `flwr run`.

    link:      connection to the SuperLink.
    home:      folder for Flower's configuration.
    processes: group that holds the process of `flwr run`.
    log:       file with the output of `flwr run`; byte `log_start` is the first one of this run.
    prefix:    words before Flower's commands that run them, for example, in another network.
    Use it in the main thread only: on Linux, `flwr run` is stopped when the thread that started it ends.
    """

    link: Link
    home: Path
    processes: Processes
    log: Path
    prefix: Sequence[str] = ()
    log_start: int = 0
    _passed: set[str] = field(default_factory=set, init=False)
    _was_unreachable: bool = field(default=False, init=False)

    @classmethod
    def start(
        cls, link: Link, config: Mapping[str, str | int | bool], *, home: Path, processes: Processes, prefix: Sequence[str] = ()
    ) -> "SubmittedRun":
        """Submit the federation's Flower app to the SuperLink and return the run.

        config:    the app's run config, see `runner.make_run_config`.
        home:      folder for Flower's configuration and the app.
        processes: group to which the process of `flwr run` is added.
        prefix:    words before Flower's command that run it, for example, in another network.
        Raises FileNotFoundError if Flower's command `flwr` is not installed.
        """
        _configure(home, link)
        app = make_private(home / "app")
        (app / "pyproject.toml").write_text(tomli_w.dumps(APP_PROJECT))
        (home / "run.toml").write_text(tomli_w.dumps(dict(config)))
        command = ["flwr", "run", str(app), CONNECTION_NAME, "--stream", "--run-config", str(home / "run.toml")]
        log = processes.find_log(RUNNER_NAME)
        log_start = log.stat().st_size if log.exists() else 0
        processes.start(RUNNER_NAME, command, cwd=home, prefix=(*prefix, "env", f"FLWR_HOME={home}"))
        return cls(link, home, processes, log, prefix, log_start)

    @property
    def identity(self) -> str | None:
        """Return Flower's number of the run, as text; None before it has one."""
        found = re.search(r"Successfully started run (\d+)", self._read_log())
        return found[1] if found else None

    def wait(self, watch: Callable[[], None], on_words: OnWords | None = None) -> None:
        """Wait until the run has finished, calling `watch` repeatedly, several times a second while `flwr run` runs.

        on_words: called with each line in which the server warns of missing clients, missing replies or failures, and with a line
        if the SuperLink does not answer.
        Raises NotReached if the SuperLink did not start the run or does not answer for `ANSWER_SECONDS`, and RunFailed if the run
        ended without completing. How it ended is read from Flower's list of runs, since the exit status of `flwr run` is 0 for
        failed runs too.
        """
        while self.processes.find_status(RUNNER_NAME) is None:
            watch()
            self._pass_warnings(on_words)
            time.sleep(0.3)
        watch()
        self._pass_warnings(on_words)
        if self.identity is None:
            raise NotReached(
                f"the SuperLink at {self.link.address} did not start the run; correct the error that Flower reports, and "
                f"run the command again. Flower's output: {_find_last_lines(self._read_log())}"
            )
        status, details, is_cut = self._find_status(watch, on_words)
        if is_cut:
            self._pass_warnings_of(self._run_flwr("log", self.identity, CONNECTION_NAME, "--show").stdout, on_words)
        if status != "finished:completed":
            raise RunFailed(status, _find_cause(status, details, self._read_log()), was_unreachable=self._was_unreachable)

    def stop(self) -> None:
        """Ask the SuperLink to stop the run if it was started. Waits at most `COMMAND_SECONDS` for the answer."""
        if self.identity is not None:
            self._run_flwr("stop", self.identity, CONNECTION_NAME)

    def _pass_warnings(self, on_words: OnWords | None) -> None:
        self._pass_warnings_of("\n".join(self.processes.read_new_lines(RUNNER_NAME)), on_words)

    def _pass_warnings_of(self, text: str, on_words: OnWords | None) -> None:
        """Call `on_words` with each warning of the server (`WARNING_LINE`) in `text` that was not found before."""
        for line in COLOUR_CODES.sub("", text).splitlines():
            found = WARNING_LINE.match(line)
            if found and found[1] not in self._passed:
                self._passed.add(found[1])
                if on_words is not None:
                    on_words(found[1])

    def _find_status(self, watch: Callable[[], None], on_words: OnWords | None) -> tuple[str, str, bool]:
        """Wait until the run has ended; return its final status, Flower's message, and whether its log may be incomplete.

        The log that `flwr run` prints ends before the run if the SuperLink is unreachable for a moment.
        Raises NotReached if the SuperLink does not answer for `ANSWER_SECONDS`.
        """
        last_answer, is_cut = time.monotonic(), False
        while True:
            try:
                (status, details), last_answer = self._ask_status(), time.monotonic()
                if status.startswith("finished"):
                    return status, details, is_cut
            except NotReached:
                if time.monotonic() - last_answer > ANSWER_SECONDS:
                    raise
                if on_words is not None and not self._was_unreachable:
                    on_words(f"the SuperLink at {self.link.address} does not answer; waiting up to {ANSWER_SECONDS:g} seconds")
                self._was_unreachable = True
            is_cut = True
            for _ in range(10):
                watch()
                time.sleep(0.3)

    def _ask_status(self) -> tuple[str, str]:
        done = self._run_flwr("list", CONNECTION_NAME, "--run-id", str(self.identity), "--format", "json")
        try:
            runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
            return str(runs[0]["status"]), str(runs[0].get("status-details", ""))
        except (ValueError, KeyError, IndexError):
            printed = _find_last_lines(_find_refusal(done.stdout) or done.stdout + done.stderr)
            raise NotReached(
                f"the SuperLink at {self.link.address} did not report the status of the run, which may still be running; check "
                f"that the SuperLink runs and can be reached. Flower's output: {printed}"
            ) from None

    def _run_flwr(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = _make_environment(self.home)
        command = [*self.prefix, "flwr", *words]
        try:
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=COMMAND_SECONDS
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"no answer within {COMMAND_SECONDS:g} seconds")

    def _read_log(self) -> str:
        if not self.log.exists():
            return ""
        return COLOUR_CODES.sub("", self.log.read_bytes()[self.log_start :].decode(errors="replace"))


def _configure(home: Path, link: Link) -> None:
    secure = {"insecure": True} if link.authority is None else {"root-certificates": str(Path(link.authority).absolute())}
    make_private(home)
    (home / "config.toml").write_text(
        tomli_w.dumps({"superlink": {"default": CONNECTION_NAME, CONNECTION_NAME: {"address": link.address, **secure}}})
    )


def _make_environment(home: Path) -> dict[str, str]:
    return {**Processes(home).environment, "FLWR_HOME": str(home), "FLWR_LOG_LEVEL": os.environ.get("FLWR_LOG_LEVEL", "INFO")}


def _find_last_lines(text: str) -> str:
    """Return the last 600 characters of an output as one line, without colours and frames; "nothing" if it is empty."""
    lines = [line.strip(" │╭╮╰╯─\t") for line in COLOUR_CODES.sub("", text).splitlines()]
    return " ".join(line for line in lines if line)[-600:] or "nothing"


def _find_refusal(text: str) -> str:
    """Return the reason in the JSON answer of a failed Flower command; empty if the answer is not JSON or has none."""
    try:
        return str(json.loads(text)["error-message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _find_cause(status: str, details: str, log: str) -> str:
    """Return why a run did not complete: Flower's message about the server's app, or else the last exception's message in `log`.

    status:  Flower's status of the run.
    details: Flower's message with the status.
    log:     output of `flwr run`.
    If `details` is not a message about the server's app and `log` contains no exception, the result is `SILENT_END_REASON` for
    the status "finished:failed", and empty for any other status.
    """
    if details.startswith(SERVER_ERROR_PREFIX):
        return " ".join(details.removeprefix(SERVER_ERROR_PREFIX).split())
    found = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception|Full|Interrupt)): (.+)$", log, re.MULTILINE)
    return str(found[-1][1]) if found else SILENT_END_REASON if status == "finished:failed" else ""
