"""A fuzzer of all commands that read a run: it changes files, links, manifest, index, truth, attacks and scores at random.

Each input is a copy of one small run with one to three random changes: links, pipes and hard links; bytes; values in JSON,
TOML, SQLite and the headers of tensor files. A command then runs in a forked process, and must end within
`SECONDS` and `MEMORY` with a message, without a traceback, without starting a process, and without changing anything outside.

    python tests/fuzz/run_fuzzer.py --seconds 600 --seed 1
"""

import argparse
import faulthandler
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from run_changes import CHANGES, STEERING

SECONDS = 10.0
"""Limit of a command's CPU time, and of the time that it may wait without using the CPU."""
MEMORY = 10**9
"""Most bytes of memory that a command may use above those of the process from which it is forked."""
SECRET = "export SECRET=1"
CHILDREN = ("subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system", "os.spawn")
"""Python's audit events for starting a process or program."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
WRONG = ("hang", "traceback", "crash", "memory", "child process", "write outside", "terminal")
"""Outcomes of a command that must not occur."""


def make_run(root: Path) -> Path:
    """Make a run in `root` with all that commands read: recorded, attacked, scored and reported."""
    import numpy as np
    import tomli_w
    import torch
    from typer.testing import CliRunner

    from attacker.cli import app as attacker
    from fedsim.config.experiment import validate
    from fedsim.engine import engines
    from fedsim.engine.run import FederationRun

    torch.set_num_threads(1)
    values = np.random.default_rng(0).integers(0, 256, (10, 4, 4), dtype=np.uint8)
    np.savez(root / "data.npz", images=values, labels=np.arange(10) % 2)
    facts = {
        "rounds": 2,
        "model": {"name": "mlp", "hidden": [4]},
        "data": {"name": "npz", "train": str(root / "data.npz")},
        "clients": {"count": 2},
        "training": {"learning_rate": 0.1, "batch_size": 1, "steps": 1},
    }
    (root / "experiment.toml").write_text(tomli_w.dumps(facts))
    engines.run(FederationRun(experiment=validate(facts, source="fuzz"), out=root / "run", client_seed=1), engine="local")
    for words in ("replay RUN --attack exact --device cpu --workers 1", "score RUN", "report RUN"):
        result = CliRunner().invoke(attacker, words.replace("RUN", str(root / "run")).split())
        if result.exit_code:
            raise RuntimeError(
                f"attacker {words} of an unchanged run ended with {result.exit_code}: {result.output} {result.exception!r}"
            ) from result.exception
    for name, asked in COMMANDS.items():  # so that modules are loaded before children are forked
        status, output = run_command(asked, root / "run", root / "experiment.toml")
        if status:
            raise RuntimeError(f"{name} of an unchanged run ended with {status}: {output}")
    shutil.rmtree(root / "state", ignore_errors=True)
    return root / "run"


COMMANDS: dict[str, tuple[str, ...]] = {
    "verify": ("fedsim", "verify", "RUN"),
    "show": ("fedsim", "show", "RUN", "--json"),
    "resume": ("fedsim", "run", "EXPERIMENT", "--out", "RUN", "--engine", "local", "--resume", "--device", "cpu"),
    "replay": ("attacker", "replay", "RUN", "--attack", "exact", "--device", "cpu", "--workers", "1"),
    "score": ("attacker", "score", "RUN", "--json"),
    "report": ("attacker", "report", "RUN"),
    "catalogue": ("service",),
}


def snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return mode, size, modification time, number of links and content of everything below a folder."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_nlink, content)
    return found


def run_command(words: tuple[str, ...], run: Path, experiment: Path) -> tuple[int, str]:
    """Run a command in this process; return its exit status with its output, or 70 with a traceback."""
    if words == ("service",):
        return read_as_the_service(run)
    from typer.testing import CliRunner

    from attacker.cli import app as attacker
    from fedsim.cli import app as fedsim

    places = {"RUN": str(run), "EXPERIMENT": str(experiment)}
    result = CliRunner().invoke(
        {"fedsim": fedsim, "attacker": attacker}[words[0]], [places.get(word, word) for word in words[1:]]
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 70, "".join(traceback.format_exception(result.exception))
    return result.exit_code, result.output


def read_as_the_service(run: Path) -> tuple[int, str]:
    """Read all that the service's index reads of a run; return status 0, or 70 with a traceback."""
    from attacker.service.index import Catalogue
    from attacker.service.settings import ServiceSettings

    try:
        settings = ServiceSettings(root=run.parent, state=run.parent / "state", workers=0, truth="own", token=False)
        catalogue = Catalogue(settings)
        catalogue.scan()
        for found in catalogue.list_runs():
            for ask in (
                catalogue.get_training,
                catalogue.get_scores,
                catalogue.list_sources,
                catalogue.get_rows,
                catalogue.list_trouble,
            ):
                ask(found)
    except Exception:
        return 70, traceback.format_exc()
    return 0, ""


def in_a_child(work: Callable[[], tuple[int, str]], allowed: tuple[Path, ...]) -> tuple[str, str, float, int]:
    """Do `work` in a forked process; return the kind of its outcome, its output, CPU seconds, and bytes above those at its start.

    The outcome is a hang if it uses more than `SECONDS` of CPU time, or waits that long without using any; elapsed time alone
    does not count, since the machine may be busy.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _do(work, writer, allowed)
    os.close(writer)
    baseline = int.from_bytes(os.read(reader, 8), "little")  # measured in the child, which has less in memory than this process
    os.set_blocking(reader, False)
    report, most, cpu, moved, killed = b"", baseline, 0.0, time.monotonic(), False
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        with suppress(BlockingIOError):
            report += os.read(reader, 1 << 20)
        if done:
            break
        most = max(most, _resident(child))
        if (now := _cpu(child)) > cpu:
            cpu, moved = now, time.monotonic()
        if not killed and (cpu > SECONDS or time.monotonic() - moved > SECONDS):
            os.kill(child, signal.SIGKILL)
            killed = True
        time.sleep(0.005)
    os.close(reader)
    above = max(most, 1024 * used.ru_maxrss) - baseline
    kind, _, words = report.decode(errors="replace").partition("\n")
    if killed:
        kind = "hang"
    elif os.WIFSIGNALED(status):
        kind, words = "crash", f"signal {os.WTERMSIG(status)}: {words}"
    elif above > MEMORY:
        kind = "memory"
    return kind or "crash", words, used.ru_utime + used.ru_stime, above


def _resident(process: int) -> int:
    """Return the bytes of a process in memory, or 0 if it has ended."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def _cpu(process: int) -> float:
    """Return the CPU seconds of a process, or 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


def _do(work: Callable[[], tuple[int, str]], writer: int, allowed: tuple[Path, ...]) -> None:
    def tell(kind: str, words: str) -> None:
        os.write(writer, f"{kind}\n{words[-4000:]}".encode("utf-8", "replace")[:60_000])
        os._exit(0)

    def audit(event: str, given: tuple[Any, ...]) -> None:
        if event in CHILDREN:
            tell("child process", f"{event} {given!r}")
        if event == "open" and isinstance(given[0], str) and os.path.isabs(given[0]) and isinstance(given[2], int):
            outside = not any(Path(given[0]).is_relative_to(folder) for folder in allowed)
            if given[2] & WRITING and outside and given[0] != os.devnull:
                tell("write outside", f"{given!r}")

    faulthandler.disable()  # a crash is recognised by its signal
    os.write(writer, _resident(os.getpid()).to_bytes(8, "little"))
    try:
        sys.addaudithook(audit)
        status, words = work()
        if STEERING in words:
            tell("terminal", words)
        tell("traceback" if status == 70 else "refused" if status else "done", words)
    except BaseException:
        tell("traceback", traceback.format_exc())


def fuzz(seconds: float, seed: int, *, only: int | None = None, show: bool = False) -> dict[str, Any]:
    """Try inputs one after the other for `seconds`; return the figures, and the first failures with their input numbers.

    only: the number of one input, to repeat it alone.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as made:
        root = Path(made)
        whole = make_run(root)
        outcomes: Counter[str] = Counter()
        failures: list[dict[str, Any]] = []
        slowest = largest = 0.0
        number, commands, end = only or 0, 0, time.monotonic() + seconds
        while time.monotonic() < end:
            rng = random.Random(f"{seed}/{number}")
            place = root / "input"
            run, outside = place / "run", place / "outside"
            shutil.copytree(whole, run)
            (outside / "folder").mkdir(parents=True)
            (outside / "secret").write_text(SECRET)
            weights = [weight for _, weight in CHANGES]
            changes = [change for change, _ in rng.choices(CHANGES, weights, k=rng.choice((1, 1, 2, 3)))]
            applied = []
            for change in changes:
                try:
                    applied.append(change(rng, run))
                except (OSError, IndexError, ValueError):  # an earlier change prevents this one
                    continue
            before = snapshot(outside)
            for name in rng.sample(sorted(COMMANDS), 2):
                commands += 1
                allowed = (run, place / "state", Path(tempfile.gettempdir()) / "never", Path("/dev/shm"))
                kind, words, took, above = in_a_child(
                    partial(run_command, COMMANDS[name], run, root / "experiment.toml"), (*allowed, *_temporary())
                )
                slowest, largest = max(slowest, took), max(largest, above)
                if snapshot(outside) != before:
                    kind = "write outside"
                outcomes[kind] += 1
                if kind not in ("done", "refused") and len(failures) < 50:
                    failures.append({"input": number, "command": name, "kind": kind, "changes": applied, "words": words[-1500:]})
                if show:
                    print(
                        number,
                        name,
                        kind,
                        applied,
                        words[-300:] if kind == "refused" else words[-1500:],
                        f"{took:.2f} s",
                        flush=True,
                    )
            _clear(place)
            number += 1
            if only is not None:
                break
    wrong = {kind: outcomes.pop(kind, 0) for kind in WRONG}
    figures = {"inputs": number - (only or 0), "commands": commands, **dict(outcomes), **wrong}
    return {**figures, "most_cpu_seconds": round(slowest, 2), "most_megabytes_above": round(largest / 1e6), "failures": failures}


def _temporary() -> tuple[Path, ...]:
    """Return the folder for temporary files, where commands may write copies of an index."""
    return (Path(tempfile.gettempdir()),) if Path(tempfile.gettempdir()) != Path("/") else ()


def _clear(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder)


def main() -> None:
    """Run the fuzzer: print the figures as JSON, and exit with status 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86_400, help="by default the day")
    parser.add_argument("--only", type=int, help="one input by its number, shown at length")
    given = parser.parse_args()
    found = fuzz(given.seconds, given.seed, only=given.only, show=given.only is not None)
    print(json.dumps({"seed": given.seed, **found}, indent=2))
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
