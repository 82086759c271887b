"""Tests of groups of processes: all end with the block, with a signal, or with the process that started them."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from socket import create_server

import pytest
from processes import wait_until

from fedsim.deployment.health import is_healthy
from fedsim.deployment.processes import RUNNER_NAME, ProcessEnded, Processes

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


def group(leader: int) -> list[int]:
    """Return the ids of the processes of a group that are not zombies."""
    found = subprocess.run(["ps", "-eo", "pid=,pgid=,stat="], capture_output=True, text=True).stdout.split("\n")
    rows = [line.split() for line in found if line.strip()]
    return [int(pid) for pid, pgid, state in rows if int(pgid) == leader and not state.startswith("Z")]


def test_a_process_and_its_children_end_with_the_block(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("parent", [sys.executable, "-c", PARENT], cwd=tmp_path)
        leader = processes._running["parent"].pid
        wait_until(lambda: len(group(leader)) == 2)
        processes.check()
    wait_until(lambda: not group(leader), seconds=5)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_processes_end_if_their_starter_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from fedsim.deployment.processes import Processes\n"
        "p = Processes(Path(sys.argv[1])); p.start('sleeper', ['sleep', '60'], cwd=Path('.'))\n"
        "print(p._running['sleeper'].pid, flush=True); time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True)
    leader = int(starter.stdout.readline())
    assert group(leader) == [leader]
    starter.kill()
    starter.wait()
    starter.stdout.close()
    wait_until(lambda: group(leader) == [])


def test_a_starter_that_is_terminated_ends_its_processes_first(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from fedsim.deployment.processes import Processes, handle_sigterm\n"
        "with handle_sigterm(), Processes(Path(sys.argv[1])) as p:\n"
        "    p.start('sleeper', ['sleep', '60'], cwd=Path('.')); print(p._running['sleeper'].pid, flush=True); time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True)
    leader = int(starter.stdout.readline())
    starter.terminate()
    assert starter.wait(30) == 143
    wait_until(lambda: not group(leader), seconds=5)
    starter.stdout.close()


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsim.deployment.processes.KILL_SECONDS", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    processes = Processes(tmp_path)
    processes.start("deaf", [sys.executable, "-c", deaf], cwd=tmp_path)
    wait_until(lambda: "deaf" in processes.read_last_lines("deaf"))
    process = processes._running["deaf"]
    processes.end_all()
    assert process.returncode == -signal.SIGKILL


def test_the_process_started_first_ends_last_and_others_get_one_signal_each(tmp_path: Path) -> None:
    """Clients sign off at the SuperLink when they end. Otherwise it would refuse the same clients for a minute."""
    leaving = (
        "import os, signal, sys, time\n"
        "def leave(*_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "    time.sleep(0.5)\n"
        "    os.kill(int(sys.argv[1]), 0)\n"
        "    print('left', flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('here', flush=True)\n"
        "time.sleep(60)\n"
    )
    names = ("client-0", "client-1")
    with Processes(tmp_path) as processes:
        processes.start("superlink", ["sleep", "60"], cwd=tmp_path)
        superlink = processes._running["superlink"]
        for name in names:
            processes.start(name, [sys.executable, "-c", leaving, str(superlink.pid)], cwd=tmp_path)
        wait_until(lambda: all("here" in processes.read_last_lines(name) for name in names))
    assert [processes.read_last_lines(name) for name in names] == ["here\nleft"] * 2
    assert superlink.returncode == -signal.SIGTERM


def test_a_party_that_exits_is_reported_with_its_output_and_a_runner_may_exit(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start(RUNNER_NAME, ["true"], cwd=tmp_path)
        assert processes.wait(RUNNER_NAME, 30) == 0
        processes.check()
        processes.start("client-0", ["sh", "-c", "echo no key; exit 3"], cwd=tmp_path)
        processes.wait("client-0", 30)
        with pytest.raises(ProcessEnded, match=r"client-0 has exited with status 3\nno key"):
            processes.check()
        with pytest.raises(ProcessEnded, match="client-0 has exited with status 3"):
            processes.wait_for("client-0", lambda: False, timeout=30)


def test_new_output_is_read_once_in_complete_lines_of_the_latest_process_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    with Processes(tmp_path) as processes:
        processes.start("a", ["echo", "the first"], cwd=tmp_path)
        processes.wait("a", 30)
        processes.start("a", ["sh", "-c", "printf 'one\\ntw'; read x < go; echo o"], cwd=tmp_path)
        output: list[str] = []

        def hear(lines: int) -> bool:
            output.extend(processes.read_new_lines("a"))
            return len(output) >= lines

        wait_until(lambda: hear(1))
        assert output == ["one"]
        (tmp_path / "go").write_text("\n")
        wait_until(lambda: hear(2))
        assert output == ["one", "two"]
        assert processes.read_new_lines("a") == []


def test_a_missing_program_is_named_with_advice(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="flower-superlunk is not installed; it is part of Flower: pip install"):
        Processes(tmp_path).start("superlink", ["flower-superlunk"], cwd=tmp_path)


def test_a_service_that_does_not_speak_http_is_not_healthy() -> None:
    with create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as one:
                one.recv(1000)
                one.sendall(b"SSH-2.0-other\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert not is_healthy(f"127.0.0.1:{server.getsockname()[1]}", None)
        thread.join()


def test_telemetry_is_off_and_programs_are_those_of_this_python(tmp_path: Path) -> None:
    environment = Processes(tmp_path).environment
    assert {key: environment[key] for key in ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK")} == {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
