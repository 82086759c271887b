"""Runner of all tests and benchmarks for a GPU, in pieces of at most nine minutes by priority: CUDA tests, then tables.

    make bench-gpu              run the pieces that are not done yet, and write a table for each
    make bench-gpu MINUTES=10   start only pieces that should finish within ten minutes, by their last run or else their limit
    make bench-gpu DRY=1        run the smallest instance of each piece on the CPU, which only checks that it starts

Other options follow `PYTHONPATH=benchmarks python -m support.gpu.pieces`: `--list` lists the pieces and their states, and `--only
NAME` runs this piece, done or not; it may be given more than once.

Each piece is a separate process, stopped after nine minutes (five in a dry run). Its output is written to `NAME.txt` in the
folder of results, and its outcome to `NAME.json`. A piece that was done or skipped with the same commit is not run again, so that
an interrupted run continues where it stopped. A benchmark is done only if it printed rows; a piece that cannot run here is
"skipped", with the reason that it printed. `README.md` in that folder has all tables, with hardware, driver and versions.
"""

import argparse
import json
import os
import platform
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch
from support.contract import VERSIONED_PACKAGES, describe_machine

ROOT = Path(__file__).parents[3]
PIECE_SECONDS = 540
"""Longest time of a piece."""
DRY_SECONDS = 300
ENDED_STATES = ("done", "skipped")
"""States of pieces that are not run again."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One piece of the GPU measurements, run as a Python process.

    shows: what its numbers show, in words. command: arguments of Python on a GPU, beginning with the script or an option such as
    "-m". dry: the arguments for a dry run on a CPU.
    In both lists, `DATA` and `DEVICE` are replaced by this run's --data and --device; without --data, `--data DATA` is left out.
    has_rows: whether the process prints a benchmark's result as one JSON object.
    """

    name: str
    shows: str
    command: str
    dry: str
    has_rows: bool = True

    def list_arguments(self, *, dry: bool, data: Path | None, device: str) -> list[str]:
        """Return the command of the process: the Python interpreter and its arguments.

        data: folder of data sets, or None. device: "cpu" or "cuda".
        """
        text = self.dry if dry else self.command
        if data is None:
            text = text.replace("--data DATA", "")
        given = [word.replace("DEVICE", device) for word in shlex.split(text)]
        return [sys.executable, *(str(data) if word == "DATA" else word for word in given)]


def make_script(name: str, shows: str, call: str, *, dry: str | None = None) -> Piece:
    """Return the piece that runs a benchmark with --data, --device and --json.

    call: name of the script in benchmarks/, with arguments. dry: the same for a dry run on a CPU; by default `call` with --quick.
    """
    end = "--data DATA --device DEVICE --json"
    small = dry if dry is not None else f"{call} --quick"
    return Piece(name=name, shows=shows, command=f"benchmarks/{call} {end}", dry=f"benchmarks/{small} {end}")


def make_tests(name: str, shows: str, chosen: str) -> Piece:
    """Return a piece that runs tests marked "cuda", which skip themselves on a CPU. chosen: paths of tests, for pytest."""
    command = f"-m pytest -q -rs -p no:cacheprovider -m cuda {chosen}"
    return Piece(name=name, shows=shows, command=command, dry=command, has_rows=False)


PIECES = (
    make_tests("tests", "placement, generators, memory, precision and resumption are right on CUDA", "tests/cuda"),
    make_script("device-placement", "each attack returns the same on the GPU as on the CPU", "support/gpu/device.py agreement"),
    make_script("device-memory", "the memory planned for a chunk beside the memory it takes", "support/gpu/device.py memory"),
    make_script("device-lenet", "iterations a second of many searches at once on a small network", "support/gpu/device.py lenet"),
    make_script(
        "device-resnet", "the same on ResNet20-4, in float32 and with convolutions in bfloat16", "support/gpu/device.py resnet"
    ),
    make_script("device-sharing", "two searches on one GPU beside one after the other", "support/gpu/device.py sharing"),
    make_script("rgap-many", "10,000 images by closed form in one batched run", "rgap.py many"),
    make_script("dlg", "CPL against DLG", "dlg.py"),
    make_script("cpl-2", "CPL's table 2 on a hundred images", "cpl.py 2"),
    make_script("agic-layers", "the gain by layer weights after 1,000 iterations", "agic.py layers"),
    make_script("real-resnet18-64", "ResNet-18 at 64 pixels, one local epoch, batches of 1, 4 and 16", "real.py resnet18-64"),
    make_script("real-mobilenet-64", "the same of MobileNet", "real.py mobilenet-64"),
    make_script("real-vit-64", "the same of a vision transformer", "real.py vit-64"),
    make_script("rog-published", "ROG at the paper's size, beside the paper's LPIPS", "rog.py --published --workers 2"),
    make_script("agic-epochs", "the gain by a second epoch whose examples are linked", "agic.py epochs"),
    make_script("agic-fedavg", "one batch against simulation of local steps", "agic.py fedavg"),
    make_script("agic-matching", "examples linked over two epochs, 1,000 images", "agic.py matching"),
    make_script("agic-shapes", "the shapes of layer weights, AGIC's table I", "agic.py shapes"),
    make_script("agic-beyond", "surrogate weights, order-invariant prior, robust weights", "agic.py beyond"),
    make_script(
        "systematic-noise",
        "several attacks behind noise, 48 images, beside the systematic evaluation's table 4",
        "systematic.py noise --full",
        dry="systematic.py noise --quick",
    ),
    make_script("real-resnet18-128", "ResNet-18 at 128 pixels", "real.py resnet18-128"),
    make_script("real-vit-128", "a vision transformer at 128 pixels", "real.py vit-128"),
    make_script("real-mobilenet-128", "MobileNet at 128 pixels", "real.py mobilenet-128"),
    make_script("cpl-6", "CPL's table 6: batch sizes and local iterations", "cpl.py 6"),
    make_script("cpl-8", "CPL's table 8: Gaussian and Laplace noise", "cpl.py 8"),
    make_script("cpl-7", "CPL's table 7: gradients of which only the largest entries are sent", "cpl.py 7"),
    make_script("cpl-1", "CPL's table 1: how many iterations are enough", "cpl.py 1"),
    make_script("cpl-3", "CPL's table 3: tables of attributes", "cpl.py 3"),
    make_script("cpl-4", "CPL's table 4: nine starts", "cpl.py 4"),
    make_script("cpl-9", "CPL's table 9: up to ten local steps", "cpl.py 9"),
    make_script("peel", "sigmoid LeNets inverted layer by layer, beside L-BFGS", "peel.py"),
    make_script(
        "engine-quality", "quality beside breaching with equal settings, where breaching is installed", "engine.py quality"
    ),
    make_script(
        "defenses-clip", "clipped updates, if attacks ignore or know the clipping, beside no defense", "defenses.py clip"
    ),
    make_script("defenses-gaussian", "noisy updates, if attacks ignore or know the noise", "defenses.py gaussian"),
    make_script("defenses-top_k", "sparsified updates, if attacks ignore or know the sparsification", "defenses.py top_k"),
    make_script("real-resnet18-224", "ResNet-18 at 224 pixels", "real.py resnet18-224"),
    make_script("real-vit-224", "a vision transformer at 224 pixels", "real.py vit-224"),
    make_script("real-mobilenet-224", "MobileNet at 224 pixels", "real.py mobilenet-224"),
    make_script("rgap-table1", "closed forms on a GPU", "rgap.py table1"),
    make_script("nulls", "no null reads the update, also on a GPU", "calibration.py nulls"),
)


def main() -> None:
    """Run the pieces that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", action="append", choices=[piece.name for piece in PIECES], metavar="NAME")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--data", type=Path, help="folder of data sets, laid out as benchmarks/README.md says")
    parser.add_argument("--out", type=Path, help="folder of results; by default benchmarks/results/gpu-HARDWARE")
    options = parser.parse_args()
    if not options.dry_run and not options.list and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; --dry-run shows on the CPU that each piece starts")
    device = "cpu" if options.dry_run else "cuda"
    out = options.out or (
        ROOT / "runs" / "gpu-dry-run" if options.dry_run else ROOT / "benchmarks" / "results" / f"gpu-{read_gpu_name()}"
    )
    if options.list:
        for piece in PIECES:
            print(f"{piece.name:<20} {find_state(out, piece, dry=options.dry_run):<10} {piece.shows}")
        return
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    for piece in PIECES:
        ended = find_state(out, piece, dry=options.dry_run) in ENDED_STATES
        if piece.name not in options.only if options.only else ended:
            continue
        limit = DRY_SECONDS if options.dry_run else PIECE_SECONDS
        if time.monotonic() + min(limit, estimate_seconds(out, piece)) > end:
            print(f"{piece.name}: not started, because it may take longer than the time left", flush=True)
            continue
        run(piece, out, limit, dry=options.dry_run, data=options.data, device=device)
        write_tables(out)
    states = {piece.name: find_state(out, piece, dry=options.dry_run) for piece in PIECES}
    skipped = [name for name, state in states.items() if state == "skipped"]
    left = [name for name, state in states.items() if state not in ENDED_STATES]
    print(
        f"{len(PIECES) - len(left) - len(skipped)} of {len(PIECES)} pieces are done"
        f"{'; skipped are ' if skipped else ''}{', '.join(skipped)}{': left are ' if left else ''}{', '.join(left)}"
    )


def run(piece: Piece, out: Path, limit: float, *, dry: bool, data: Path | None, device: str) -> None:
    """Run a piece; write its output to NAME.txt in the folder `out`, and its state, exit status, time and versions to NAME.json.

    limit: seconds after which it is killed. dry: whether to run its dry run. data: folder of data sets. device: "cpu" or "cuda".
    """
    words, printed = piece.list_arguments(dry=dry, data=data, device=device), out / f"{piece.name}.txt"
    (out / f"{piece.name}.json").unlink(missing_ok=True)  # the output of an earlier run is overwritten
    started, spent = time.monotonic(), _read_child_seconds()
    with printed.open("w") as file:
        status = _run_process(words, file, limit)
    state, reason = ("too long", "") if status is None else ("failed", "") if status else judge_output(piece, printed.read_text())
    result = {
        "piece": piece.name,
        "state": state,
        "reason": reason,
        "status": status,
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(_read_child_seconds() - spent, 1),
        "command": shlex.join(["python", *words[1:]]),
        "code": read_commit(),
        "machine": describe_machine(),
        "versions": read_versions(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "dry_run": dry,
    }
    (out / f"{piece.name}.json").write_text(json.dumps(result, indent=2) + "\n")
    summary = f"{state} ({reason})" if reason else state
    print(f"{piece.name}: {summary} after {result['seconds']} s, {result['cpu_seconds']} CPU-seconds", flush=True)


def _run_process(words: Sequence[str], file: IO[str], limit: float) -> int | None:
    """Run a process with its output in `file`; return its status, or None if it was killed after `limit` seconds.

    Processes that it started and that still run at its end are killed. If this process is interrupted, all of them are killed.
    """
    process = subprocess.Popen(
        words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=_make_environment(), start_new_session=True
    )
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _make_environment() -> dict[str, str]:
    """Return the environment of a piece's process.

    If this process may not write compiled modules, pieces write theirs to a common folder: compiling takes most of a dry run.
    """
    path = f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    compiled = {"PYTHONPYCACHEPREFIX": str(ROOT / "runs" / "compiled-modules"), "PYTHONDONTWRITEBYTECODE": ""}
    return {**os.environ, "PYTHONPATH": path, **(compiled if os.environ.get("PYTHONDONTWRITEBYTECODE") else {})}


def _read_child_seconds() -> float:
    """Return the CPU-seconds of all processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def judge_output(piece: Piece, text: str) -> tuple[str, str]:
    """Return the state of a piece whose process ended with status 0, and the reason for it, which is "" if it is done.

    text: output of the process. A benchmark is "done" if it printed rows, "skipped" if it printed a reason for having none, and
    otherwise "failed". Tests are "done" if at least one passed, and otherwise "skipped".
    """
    lines = text.splitlines()
    if not piece.has_rows:
        last = lines[-1] if lines else ""
        reasons = {found[1] for line in lines if (found := re.match(r"SKIPPED .*?: (.*)", line))}
        return ("done", "") if " passed" in last else ("skipped", "; ".join(sorted(reasons)) or last)
    result = next((json.loads(line) for line in reversed(lines) if line.startswith('{"benchmark"')), None)
    if result is None:
        return "failed", "it printed no result"
    if result["rows"]:
        return "done", ""
    reason = next((line.removeprefix("skipped: ") for line in lines if line.startswith("skipped: ")), "")
    return ("skipped", reason) if reason else ("failed", "its table has no rows")


def find_state(out: Path, piece: Piece, *, dry: bool) -> str:
    """Return the state of a piece by its last result in the folder `out`.

    It is "done", "skipped", "failed", "too long" (killed at its limit), "other code" (done or skipped, but with another commit),
    or "left" if it has no result. dry: whether the result must be of a dry run; if not, it must be of a run on a GPU.
    """
    result = _read_result(out, piece)
    if result is None or result["dry_run"] != dry:
        return "left"
    return "other code" if result["state"] in ENDED_STATES and result["code"] != read_commit() else str(result["state"])


def estimate_seconds(out: Path, piece: Piece) -> float:
    """Return the seconds that a piece took in its last run if its state is "done", otherwise the limit `PIECE_SECONDS`."""
    result = _read_result(out, piece)
    return float(result["seconds"]) if result is not None and result["state"] == "done" else PIECE_SECONDS


def _read_result(out: Path, piece: Piece) -> dict[str, Any] | None:
    try:
        return dict(json.loads((out / f"{piece.name}.json").read_text()))
    except (OSError, ValueError):
        return None


def write_tables(out: Path) -> None:
    """Write README.md in the folder `out`, with a section for each piece that ran: hardware, versions, command and table."""
    lines = ["# Results on a GPU", "", "Made by `make bench-gpu`; each piece says with which hardware and versions.", ""]
    for piece in PIECES:
        if (result := _read_result(out, piece)) is None:
            continue
        summary = f"{result['state']} ({result['reason']})" if result.get("reason") else result["state"]
        lines += [f"## {piece.name}: {piece.shows}", "", f"{summary} in {result['seconds']} s on {result['date']}; "]
        lines[-1] += f"{result['machine']}; {', '.join(f'{name} {number}' for name, number in result['versions'].items())}; "
        lines[-1] += f"code {result['code']}{'; dry run on a CPU: its numbers mean nothing' if result['dry_run'] else ''}"
        lines += ["", f"    {result['command']}", "", *_find_table(out / f"{piece.name}.txt"), ""]
    (out / "README.md").write_text("\n".join(lines))


def _find_table(printed: Path) -> list[str]:
    """Return the lines of the table and the summary in the file `printed`, a piece's output; without a table, the last 15."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed.read_text(errors="replace"))
    lines = [line for line in text.splitlines() if not line.startswith('{"benchmark"')]
    first = next((i for i, line in enumerate(lines) if line.startswith("|")), None)
    return lines[first:] if first is not None else ["```", *lines[-15:], "```"]


def read_gpu_name() -> str:
    """Return the name of the GPU in lower case with hyphens, for use in a folder's name; "none" without a GPU."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read_versions() -> dict[str, str]:
    """Return a dict from "python", "cuda", "driver" and the name of each of `VERSIONED_PACKAGES` to its version.

    Without nvidia-smi the driver is "none".
    """
    versions = {"python": platform.python_version(), **{package: version(package) for package in VERSIONED_PACKAGES}}
    versions["cuda"] = str(torch.version.cuda)
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        versions["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip().split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        versions["driver"] = "none"
    return versions


def read_commit() -> str:
    """Return the short hash of this checkout's commit; without git or a git checkout, name and version of the package."""
    commit = ""
    with suppress(OSError):  # git is not installed
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    return commit or f"fedleak {version('fedleak')}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the running piece is killed as well
    main()
