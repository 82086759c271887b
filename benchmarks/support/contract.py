"""The parts that all benchmark scripts share: command line options, CPU time, and the output of results."""

import argparse
import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import process_time
from typing import Any

import torch

from attacker.replay.environment import describe_environment
from attacker.sweep.run import exit_with_parent

VERSIONED_PACKAGES = ("torch", "numpy", "flwr")

ResultRow = dict[str, Any]
"""A row of a benchmark's table, or its summary, as a dict from column to value."""
TableAndSummary = tuple[list[ResultRow], ResultRow]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a benchmark.

    quick: whether to run a smaller instance of the work. json: whether to print the result as JSON, too. data: folder of data
    sets; None to use only those in the package. device: "cpu" or "cuda". seed: of random weights, draws and attacks. table: name
    of the selected table; None if none was named. flags: names of the benchmark's own switches that were given.
    workers: number of processes that attack at the same time, in benchmarks that offer it.
    """

    quick: bool
    json: bool
    data: Path | None
    device: str
    seed: int
    table: str | None
    flags: frozenset[str] = frozenset()
    workers: int = 1


def parse_options(
    description: str, *, tables: Sequence[str] = (), flags: Sequence[str] = (), offers_workers: bool = False
) -> Options:
    """Parse the command line of a benchmark, and return its options. An invalid command line ends the program with a message.

    description: text of --help. tables: names of tables that can be selected. flags: additional switches, without "--".
    offers_workers: whether there is the option --workers, which is the number of cores by default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if tables:
        parser.add_argument("table", nargs="?", choices=tables)
    parser.add_argument("--quick", action="store_true", help="a smaller instance of the same work, under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of stdout")
    parser.add_argument("--data", type=Path, help="folder of data sets, laid out as benchmarks/README.md says")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument("--seed", type=int, default=0)
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    if offers_workers:
        cores = len(os.sched_getaffinity(0))
        parser.add_argument(
            "--workers", type=_parse_count, default=cores, help=f"number of processes (default: {cores}, all cores)"
        )
    given = vars(parser.parse_args())
    chosen = frozenset(flag for flag in flags if given.pop(flag))
    return Options(table=given.pop("table", None), flags=chosen, **given)


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be a whole number of at least 1, got {text!r}")
    return int(text)


@dataclass
class Clock:
    """The CPU-seconds of a `with measure_cpu()` block; `seconds` is 0 until the block ends."""

    seconds: float = 0.0


def read_peak_memory(status: str | None = None) -> float:
    """Return the peak of a process's memory in MB, without what its parent had when it started the process.

    status: text of the file /proc/PID/status of the process; None for the process that calls this function.
    """
    text = Path("/proc/self/status").read_text() if status is None else status
    (peak,) = (line.split()[1] for line in text.splitlines() if line.startswith("VmHWM"))
    return int(peak) / 1024


@contextmanager
def measure_cpu() -> Iterator[Clock]:
    """Measure the CPU-seconds that this process spends in a `with` block, which yields a `Clock`.

    This sets PyTorch to one thread, also for the time after the block.
    """
    torch.set_num_threads(1)
    clock, started = Clock(), process_time()
    try:
        yield clock
    finally:
        clock.seconds = process_time() - started


def prepare_worker() -> None:
    """Prepare a worker process: one thread for PyTorch. It ends on Ctrl-C, and soon after its parent process.

    The default action of Ctrl-C is restored, since an attack would return an unfinished answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()


def describe_machine() -> str:
    """Return the name of the processor, the number of logical cores and, if there is a CUDA device, its name, as one text."""
    cpu = describe_environment()["processor"]
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{cpu}, {os.cpu_count()} cores{gpu}"


def show_rows(rows: Iterable[ResultRow]) -> Iterator[ResultRow]:
    """Yield the rows of a table, and print each on stderr as soon as it is there."""
    for row in rows:
        print(row, file=sys.stderr, flush=True)
        yield row


def print_results(name: str, rows: Sequence[dict[str, Any]], summary: dict[str, Any], options: Options) -> None:
    """Print machine and versions, the rows as a table, and the summary; with --json also all of it as JSON on the last line.

    name: title of the results.
    """
    versions = {package: version(package) for package in VERSIONED_PACKAGES} | {"python": platform.python_version()}
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print(f"{name}: {describe_machine()}; {', '.join(f'{k} {v}' for k, v in versions.items())}; seed {options.seed}\n")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(_format_value(row.get(column)) for column in columns)} |")
    print("\n" + "\n".join(f"{key}: {_format_value(value)}" for key, value in summary.items()))
    if options.json:
        result = {"benchmark": name, "machine": describe_machine(), "versions": versions, "rows": list(rows), "summary": summary}
        print(json.dumps(result, allow_nan=False))
    sys.stdout.flush()


def run_selected_table(name: str, description: str, tables: Mapping[str, Callable[[Options], TableAndSummary]]) -> None:
    """Run the table that the command line names, or else the first of `tables`, and print its results.

    name: name of the benchmark, with which the title begins. description: text of --help. tables: functions that measure a table,
    by the table's name.
    """
    options = parse_options(description, tables=tuple(tables))
    table = options.table or next(iter(tables))
    print_results(f"{name} {table}", *tables[table](options), options)


def _format_value(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
