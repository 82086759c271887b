"""Tests of console output: an error is one message on stderr and an exit status, 2 if the user can correct it, else 1."""

import io
import json
import math
import os
import sqlite3
import subprocess
import sys
import time

import pytest
import typer
from rich.console import Console
from rich.text import Text

from fedsim.commands import console

CONSOLES = (console.out, console.err)


def test_text_like_an_emoji_code_is_printed_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in CONSOLES:
        monkeypatch.setattr(one, "_file", io.StringIO())
        one.print(":abc: 127.0.0.1:100: a", Text.from_markup("plain"))
        assert one.file.getvalue() == ":abc: 127.0.0.1:100: a plain\n"


@pytest.fixture(autouse=True)
def _captured_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "err", Console(stderr=True, soft_wrap=True, highlight=False))


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ValueError("no such key"), 2, "no such key"),
        (ValueError("[bold]a name"), 2, "[bold]a name"),
        (ValueError("a\x1b]0;title\x07b\u202e\udcff"), 2, "a?]0;title?b??"),
        (FileNotFoundError(2, "no such file"), 2, "no such file"),
        (NotADirectoryError(20, "a file"), 2, "a file"),
        (RuntimeError("out of memory"), 1, "out of memory"),
        (PermissionError(13, "closed"), 1, "closed"),
        (OSError(28, "no space left"), 1, "no space left"),
        (OSError(28, os.strerror(28), "a/b"), 1, "a/b: No space left on device; free disk space, and run the same command again"),
        (NotADirectoryError(20, os.strerror(20), "a/b"), 2, "a/b: Not a directory; a part of this path is a file; name a folder"),
        (OSError(30, os.strerror(30), "a"), 1, "a: Read-only file system; choose a folder that can be written to"),
        (RecursionError("maximum recursion depth exceeded"), 1, "is nested too deeply"),
        (UnicodeEncodeError("utf-8", "\udcc3", 0, 1, "surrogates not allowed"), 2, "set LC_ALL=C.UTF-8, or PYTHONUTF8=1"),
        (MemoryError(), 1, "there is not enough memory; attack fewer cases at once with --chunk"),
        (sqlite3.OperationalError("disk I/O error"), 1, "disk I/O error; check it with fedsim verify"),
        (KeyboardInterrupt(), 130, "interrupted; half of it is there"),
    ],
)
def test_an_error_is_one_message_and_a_status(
    error: BaseException, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as left, console.report_errors(kept="half of it is there"):
        raise error
    assert left.value.exit_code == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_closed_pipe_prints_no_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as left, console.report_errors():
        raise BrokenPipeError
    assert left.value.exit_code == 1
    assert capsys.readouterr().err == ""


def test_an_error_in_the_program_itself_keeps_its_traceback() -> None:
    with pytest.raises(AssertionError, match="impossible"), console.report_errors():
        raise AssertionError("impossible")
    with pytest.raises(ValueError, match="told in full"), console.report_errors(verbose=True):
        raise ValueError("told in full")


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("a=1", ("a", 1)),
        ("a.b = 1.5", ("a.b", 1.5)),
        ("a=true", ("a", True)),
        ("a=[1, 2]", ("a", [1, 2])),
        ("a='1'", ("a", "1")),
        ("a=clip(1) | clip(2)", ("a", "clip(1) | clip(2)")),
        ("a=b=c", ("a", "b=c")),
        ("a=", ("a", "")),
        ("a=1-3", ("a", "1-3")),
    ],
)
def test_an_assignment_is_toml_or_else_text(text: str, pair: tuple[str, object]) -> None:
    assert console.parse_assignment(text) == pair
    assert type(console.parse_assignment(text)[1]) is type(pair[1])


@pytest.mark.parametrize("text", ["a", "", "=1", " =1"])
def test_a_text_without_an_assignment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--set {text}: write it as KEY=VALUE"):
        console.parse_assignment(text)


def test_json_is_one_document_and_nan_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"a": [1, None, "é"]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, None, "é"]}
    with pytest.raises(ValueError, match="JSON"):
        console.print_json({"loss": math.nan})


@pytest.mark.parametrize("status", [1, 2, 130])
def test_a_failure_ends_the_process_even_if_a_thread_is_still_running(status: int) -> None:
    """Without this, Flower's server would wait in its own thread for an hour if its clients cannot start."""
    program = (
        "import threading, time, typer, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from fedsim.commands.console import run_and_exit\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def fail():\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    print('half of the')\n"
        f"    raise typer.Exit({status})\n"
        "run_and_exit(app)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=59)
    assert (done.returncode, done.stdout) == (status, "half of the\n")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_exit_status_is_that_of_the_command(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is listed here, since threads of other tests would make `run_and_exit` end this process."""
    monkeypatch.setattr(console.threading, "enumerate", list)
    app = typer.Typer()

    @app.command()
    def leave() -> None:
        raise typer.Exit(status)

    with pytest.raises(SystemExit) as left:
        console.run_and_exit(lambda: app(args=[]))
    assert (left.value.code or 0) == status


def test_without_a_terminal_progress_is_printed_line_by_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PROGRESS_SECONDS", 0.02)
    with console.show_progress_bar() as bar:
        ended = bar.add_task("ended", total=1, words="")
        bar.update(ended, completed=1)
        bar.add_task("null", total=None, words="")
        task = bar.add_task("federation", total=20, words="starting")
        bar.update(task, completed=3.4267, words="loss 0.1")
        assert bar.tasks[ended].finished
        time.sleep(0.2)
    captured = capsys.readouterr().err.splitlines()
    assert "federation: 3.4 of 20, loss 0.1, after 0:00:00" in captured
    assert "null: under way, after 0:00:00" in captured
    assert not any(line.startswith("ended") for line in captured)
    time.sleep(0.1)
    assert not capsys.readouterr().err  # nothing is printed after the bar is closed
