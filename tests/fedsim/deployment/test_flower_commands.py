"""Tests of the commands that deployments give to Flower, and of its answers; a shell script stands in for `flwr`."""

import json
import os
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import parse_config_args

from fedsim.deployment import commands
from fedsim.deployment.commands import Link
from fedsim.deployment.flower_commands import APP_PROJECT, NotReached, RunFailed, SubmittedRun, enrol
from fedsim.deployment.processes import Processes
from fedsim.deployment.runner import Config, run_to_end

LINK = Link(address="127.0.0.1:1", authority=None)
STARTED = "echo 'Successfully started run 17'"
LOG = "Successfully started run 17\\nTraceback (most recent call last):\\n  File x\\nValueError: no room\\nmore words"


@pytest.fixture
def play(tmp_path: Path) -> Callable[[str, str], SubmittedRun]:
    """A function that submits a run to a fake `flwr`, given the shell code of its commands `run` and `list`."""

    def submit(run: str, listed: str) -> SubmittedRun:
        script = tmp_path / "bin" / "flwr"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\nif [ $1 = run ]; then\n{run}\nelse\n{listed}\nfi\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        processes = Processes(tmp_path / "logs")
        processes.environment["PATH"] = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
        return SubmittedRun.start(LINK, {"out": "/out"}, home=tmp_path / "home", processes=processes)

    return submit


@pytest.fixture(autouse=True)
def _fake_flwr_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsim.deployment.processes._make_path", lambda: f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("fedsim.deployment.flower_commands.ANSWER_SECONDS", 0.0)


def status(words: str) -> str:
    return f'echo \'{{"runs": [{{"status": "{words}"}}]}}\''


def test_failed_runs_are_recognised_although_flwr_run_exits_with_0(play: Callable[[str, str], SubmittedRun]) -> None:
    watched: list[int] = []
    play(STARTED, status("finished:completed")).wait(lambda: watched.append(1))
    assert watched
    submitted = play(f'printf "{LOG}\\n"', status("finished:failed"))
    with pytest.raises(RunFailed, match=r"^the run ended as finished:failed: no room$"):
        submitted.wait(lambda: None)
    assert submitted.identity == "17"


def listed(status: str, details: str) -> str:
    return f"cat <<'END'\n{json.dumps({'runs': [{'status': status, 'status-details': details}]})}\nEND"


@pytest.mark.parametrize(
    ("state", "details", "words"),
    [
        ("failed", "ServerApp failed with exception: no client\never answered", ": no client ever answered"),
        *(
            (
                "failed",
                details,
                ": the server's process exited without a message; see its log, start it again and continue with --resume",
            )
            for details in ("No heartbeat received from the task", "Task failed with unknown error.", "N/A")
        ),
        ("stopped", "N/A", ""),
    ],
)
def test_the_cause_of_a_failure_is_taken_from_the_superlinks_details_of_the_run(
    state: str, details: str, words: str, play: Callable[[str, str], SubmittedRun]
) -> None:
    with pytest.raises(RunFailed, match=f"^the run ended as finished:{state}{words}$"):
        play(STARTED, listed(f"finished:{state}", details)).wait(lambda: None)


def test_only_the_projects_own_warnings_are_passed_on_from_the_servers_log(
    play: Callable[[str, str], SubmittedRun], tmp_path: Path
) -> None:
    """The project's server code logs them through Flower's formatter, between warnings of Flower, and the runner finds them."""
    log = tmp_path / "said.log"
    program = (
        "import logging\n"
        "from fedsim.server.attendance import WaitingGrid\n"
        "from flwr.serverapp import Grid\n"
        "WaitingGrid.__abstractmethods__ = frozenset()\n"
        "inner = type('Two', (), {'get_node_ids': lambda self: [1, 2]})()\n"
        "logging.getLogger('flwr').warning('5 clients are slow')\n"
        "try: WaitingGrid(inner, 3, patience=0).get_node_ids()\n"
        "except TimeoutError: pass\n"
        "words = '1 of 6 replies are missing, the first, of client 2 in round 1: OSError: a [b] 100%'\n"
        "logging.getLogger('flwr').warning('%s', words)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    log.write_text(done.stdout + done.stderr)
    assert log.read_text().count("WARNING") == 3
    warnings: list[str] = []
    submitted = play(f"echo 'Successfully started run 17'; cat {log}; sleep 1; echo more", status("finished:completed"))
    submitted.wait(lambda: None, warnings.append)
    assert warnings == [
        "2 of 3 clients are connected; start the others again, they are waited for up to 0 seconds",
        "1 of 6 replies are missing, the first, of client 2 in round 1: OSError: a [b] 100%",
    ]


def test_warnings_that_the_log_stream_missed_are_passed_on_from_the_whole_log(
    play: Callable[[str, str], SubmittedRun], tmp_path: Path
) -> None:
    first, last = "2 of 3 clients are connected; start the others", "not everything succeeded: 1 reply is missing"
    ended = tmp_path / "ended"
    script = (
        f"if [ $1 = log ]; then printf 'WARNING :     {first}\\nWARNING :     {last}\\n'\n"
        f"elif [ -e {ended} ]; then {status('finished:completed')}\n"
        f"else touch {ended}; {status('running')}; fi"
    )
    warnings: list[str] = []
    play(f"echo 'Successfully started run 17'; echo 'WARNING :     {first}'", script).wait(lambda: None, warnings.append)
    assert warnings == [first, last]


REFUSED = json.dumps({"success": False, "error-message": "The SuperLink\nis unavailable.\n\n1"})


@pytest.mark.parametrize(
    ("start", "status", "words"),
    [
        (
            "echo '│ Connection to the SuperLink is unavailable. │'; exit 1",
            "exit 1",
            "did not start the run; .*Connection to the SuperLink is unavailable",
        ),
        (STARTED, "echo gone; exit 1", "did not report the status of the run.* output: gone$"),
        (STARTED, f"cat <<'END'\n{REFUSED}\nEND\nexit 1", r"status of the run.* output: The SuperLink is unavailable\. 1$"),
    ],
)
def test_a_run_that_is_not_started_or_has_no_status_is_a_failure(
    start: str, status: str, words: str, play: Callable[[str, str], SubmittedRun]
) -> None:
    with pytest.raises(NotReached, match=words):
        play(start, status).wait(lambda: None)


def test_a_superlink_that_never_answers_is_given_up_on(
    play: Callable[[str, str], SubmittedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.deployment.flower_commands.COMMAND_SECONDS", 0.2)
    submitted = play(STARTED, "exec sleep 20")
    with pytest.raises(NotReached, match=r"status of the run.* output: no answer within 0\.2 seconds"):
        submitted.wait(lambda: None)
    submitted.stop()


@pytest.mark.parametrize("is_lost", [True, False])
def test_only_runs_that_fail_after_an_outage_of_the_superlink_are_continued(
    is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If `is_lost`, the SuperLink once does not answer before the first run fails; then a second run completes the first."""
    monkeypatch.setattr("fedsim.deployment.flower_commands.ANSWER_SECONDS", 60.0)
    runs, asked = tmp_path / "runs", tmp_path / "asked"
    script = tmp_path / "bin" / "flwr"
    script.parent.mkdir()
    script.write_text(
        f"#!/bin/sh\nif [ $1 = run ]; then echo >> {runs}; cp {tmp_path}/home/run.toml {tmp_path}/$(wc -l < {runs}).toml\n"
        f"echo Successfully started run 1$(wc -l < {runs}); exit; fi\n"
        f"[ $1 = list ] || exit 0\n"
        f"[ $4 = 12 ] && exec echo '{json.dumps({'runs': [{'status': 'finished:completed'}]})}'\n"
        f"if {'true' if is_lost else 'false'} && [ ! -e {asked} ]; then touch {asked}; exit 1; fi\n"
        f"echo '{json.dumps({'runs': [{'status': 'finished:failed', 'status-details': 'half a push'}]})}'\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    warnings: list[str] = []
    processes = Processes(tmp_path / "logs")
    processes.environment["PATH"] = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
    config: Config = {"out": "/out", "resume": False}

    def run() -> None:
        run_to_end(LINK, config, tmp_path / "home", processes, lambda: None, warnings.append)

    if not is_lost:
        with pytest.raises(RunFailed):
            run()
        assert not (tmp_path / "2.toml").exists()
        return
    run()
    assert [tomllib.loads((tmp_path / f"{n}.toml").read_text())["resume"] for n in (1, 2)] == [False, True]
    assert "does not answer" in warnings[0]
    assert warnings[1].endswith("so the run continues from its last finished round")


def test_the_submitted_app_has_the_components_and_settings_of_the_project_and_no_code(tmp_path: Path) -> None:
    own = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    sent: Any = APP_PROJECT["tool"]["flwr"]["app"]
    assert sent["components"] == own["components"]
    assert sent["config"].keys() == own["config"].keys()
    assert "fab-include" not in sent


def test_a_clients_configuration_reads_back_as_flower_reads_it() -> None:
    config = commands.make_client_config(2, 3, "/a folder/with = signs", experiment="/e.toml", seed=7)
    assert parse_config_args([commands.format_config(config)]) == config
    assert config["data"] == "part:/a folder/with = signs/data"
    for path in ('/a"b', "/a'b", "/a\\b", "/a\nb"):
        with pytest.raises(ValueError, match="Flower cannot read quotation marks"):
            commands.format_config({"data": path})


def test_a_folder_without_public_keys_cannot_be_enrolled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no public keys of clients \(\*\.pub\)"):
        enrol(LINK, tmp_path, home=tmp_path / "home")
