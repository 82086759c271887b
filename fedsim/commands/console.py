"""Console output that both command lines share: progress and errors on stderr, results on stdout, and exit statuses."""

import errno
import json
import os
import platform
import sqlite3
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn

out = Console(highlight=False, emoji=False, soft_wrap=not sys.stdout.isatty())
err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=not sys.stderr.isatty())


EXIT_FAILURES = 1
"""Exit status of a command that ran to its end, but in which clients or attacked cases failed, or the model diverged."""
EXIT_UNFINISHED = 3
"""Exit status of a command without failures that leaves some cases unfinished: not yet attacked, or interrupted."""

ALLOW_FAILURES = "Exit with status 0 even if some clients or cases failed."
Code = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE:NAME", help="Code of your own, named by a recording or experiment, that may be imported; may be repeated."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def make_command_line(summary: str) -> typer.Typer:
    """Return a command line without commands, with the help text `summary` and the options --version and --code.

    --code module:function imports code of the user. From then on, experiments and recordings may give this module:function in
    place of the name of a component, such as a model or a defense.
    For an unknown command, similar names are suggested.
    """
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich", help=summary)
    app.suggest_commands = False  # Click suggests commands itself

    @app.callback(help=summary)
    def _read_options(
        show_version: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help=VERSION_HELP)
        ] = False,
        code: Code = None,
    ) -> None:
        if code:
            with report_errors():
                from defenses.registry import references

                for reference in code:
                    references.admit(reference)

    return app


VERSION_HELP = "Print the versions of fedleak, Python and the packages that results depend on, and exit."


def _print_version(wanted: bool) -> None:
    """Print the versions of fedleak, Python, PyTorch, Flower and NumPy, one per line, and exit, if the option was given."""
    if wanted:
        print(f"fedleak {version('fedleak')}")
        print(f"python {platform.python_version()}")
        for package in ("torch", "flwr", "numpy"):
            print(f"{package} {version(package)}")
        raise typer.Exit


PROGRESS_SECONDS = 30.0
"""Seconds between two lines of progress if stderr is not a terminal."""


@contextmanager
def show_progress_bar() -> Iterator[Progress]:
    """Show a progress bar on stderr within a `with` block. Tasks are added with a field `words`, which is shown beside the bar.

    If stderr is not a terminal, print one line per unfinished task every `PROGRESS_SECONDS` instead.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, TextColumn("{task.fields[words]}"), console=err, transient=True, disable=not err.is_terminal)
    ended = threading.Event()

    def print_lines() -> None:
        while not ended.wait(PROGRESS_SECONDS):
            for task in bar.tasks:
                if not task.finished:
                    err.print(_describe_progress(task))  # the description is Rich markup already, as in the bar

    with bar:
        if not err.is_terminal:
            threading.Thread(target=print_lines, name="progress", daemon=True).start()
        try:
            yield bar
        finally:
            ended.set()


def _describe_progress(task: Task) -> str:
    """Return the progress of a task as one line: the amount done of the total, the task's field `words`, and the time."""
    done = "under way" if task.total is None else f"{round(task.completed, 1):g} of {task.total:g}"
    text = task.fields.get("words", "")
    return f"{task.description}: {done}{', ' * bool(text)}{text}, after {timedelta(seconds=int(task.elapsed or 0))}"


@contextmanager
def report_errors(*, verbose: bool = False, kept: str = "nothing was written") -> Iterator[None]:
    """Turn expected exceptions into one message on stderr and an exit status.

    The status is 2 for ValueError, for a file that is missing or exists already, for a folder in place of a file, and for a file
    in place of a folder; 1 for other OSError, RuntimeError, MemoryError and errors of SQLite; and 130 for Ctrl-C. If the reader
    of the output has closed it, the status is 1, without a message. Other exceptions are not caught.
    verbose: raise these errors instead, except for Ctrl-C and closed output.
    kept:    clause, printed after "interrupted; ", on what Ctrl-C left on disk.
    """
    try:
        yield
    except (typer.Exit, typer.Abort):  # the command has printed its message
        raise
    except KeyboardInterrupt:
        err.print(f"interrupted; {kept}")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise typer.Exit(1) from None
    except (ValueError, OSError, RuntimeError, MemoryError, sqlite3.Error) as error:
        if verbose:
            raise
        # names may contain terminal escape sequences
        message = "".join(c if c.isprintable() or c == "\n" else "?" for c in _describe_error(error))
        err.print(f"[bold red]error[/] {escape(message)}")
        usage = isinstance(error, (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError))
        raise typer.Exit(2 if usage else 1) from None


ADVICE_BY_ERRNO = {  # what to do about an error of the operating system
    errno.ENOTDIR: "a part of this path is a file; name a folder",
    errno.ENOSPC: "free disk space, and run the same command again",
    errno.EDQUOT: "free disk space, and run the same command again",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "ask its owner for permission, or choose another path",
    errno.EPERM: "ask its owner for permission, or choose another path",
    errno.EISDIR: "name a file instead of a folder",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "let the process open more files, with ulimit -n",
    errno.EIO: "the disk may be broken; see the system's log",
}


def _describe_error(error: Exception) -> str:
    """Return the message for an error, with advice for some kinds of errors.

    For an error of the operating system, the message contains the path, if known.
    """
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        mend = f"; {ADVICE_BY_ERRNO[error.errno]}" if error.errno in ADVICE_BY_ERRNO else ""
        return f"{where}{error.strerror or os.strerror(error.errno)}{mend}"
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        return "a path or an argument has letters that this locale cannot decode; set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
    if isinstance(error, MemoryError):
        return f"there is not enough memory{': ' * bool(str(error))}{error}; attack fewer cases at once with --chunk"
    if isinstance(error, RecursionError):
        return "the file is nested too deeply; files of this project have only a few levels"
    if isinstance(error, sqlite3.Error):
        return f"the index of the recording cannot be used: {error}; check it with fedsim verify"
    return str(error)


def format_count(count: int, noun: str) -> str:
    """Return the count and the noun as text, with the plural in "s" unless the count is 1, such as "1 round" or "0 rounds"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def print_json(value: Any) -> None:
    """Print a value as one JSON document on stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))


def run_and_exit(app: typer.Typer) -> None:
    """Run a command line and exit with its status. After a failure, do not wait for threads, such as Flower's, that still run."""
    status: Any = 0
    try:
        app()
    except SystemExit as end:
        status = end.code
    lingering = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    if lingering and status not in (0, None):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)
    sys.exit(status)


def parse_assignment(text: str) -> tuple[str, Any]:
    """Return key and value of a text `KEY=VALUE`. The value is parsed as TOML, or kept as a string if it is not valid TOML.

    Raises ValueError if the text has another form.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"--set {text}: write it as KEY=VALUE")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value
