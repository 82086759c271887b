"""Resumption of sweeps: whether a sweep that is killed three times gives the same table as one that is never interrupted.

The grid compares twelve defenses, and no defense, by six attacks on the embedded digits: three clients, one round, updates of one
example. A first sweep runs to its end. A second sweep starts in an empty folder. Three times it runs for a quarter of the first
sweep's time and is killed (SIGKILL, with its workers); then it is continued to its end. Both write sweep.csv.

`cpu_seconds` is the CPU time of a sweep with its workers, except workers that were killed. `kills` is how often the sweep was
killed, `finished` how many federations were finished at each kill. `--quick` takes three defenses and two attacks.
`same_table` is 1 if both tables are equal.
aims: same_table 1, federations 13, attacks 6.
"""

import csv
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

from support.contract import Options, ResultRow, parse_options, print_results

EXPERIMENT_TOML = """
rounds = 1
model = { name = "mlp", hidden = [32] }
data = "digits"
clients = { count = 3 }
training = { learning_rate = 0.1, batch_size = 1, steps = 1 }
"""
DEFENSE_STRENGTHS = {
    "clip": '["clip(0.05)"]',
    "noise": '["gaussian(0.001)"]',
    "laplace": '["laplace(0.001)"]',
    "clip_and_noise": '["clip(0.5) | gaussian(0.001)"]',
    "top_k": '["top_k(0.1)"]',
    "random_k": '["random_k(0.3)"]',
    "prune": '["prune(0.8)"]',
    "dropout": '["gradient_dropout(0.5)"]',
    "sign": '["sign()"]',
    "qsgd": '["qsgd(levels=8)"]',
    "uniform": '["uniform(4)"]',
    "dp_sgd": '[{ gradient = "dp_sgd(max_norm=1, noise=0.1)" }]',
}
SEARCH_ARGUMENTS = "steps = 60"
ATTACK_ARGUMENTS = {
    "exact": 'fallback = "none"',
    "cpl": SEARCH_ARGUMENTS,
    "dlg": SEARCH_ARGUMENTS,
    "idlg": SEARCH_ARGUMENTS,
    "inverting_gradients": SEARCH_ARGUMENTS,
    "hgap": SEARCH_ARGUMENTS,
}
WORKER_COUNT, KILL_COUNT = 2, 3


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_grid(options, folder)
        whole = run_sweep(folder, folder / "whole", kill_after=None)
        killed = run_interrupted(folder, whole["seconds"] / (KILL_COUNT + 1))
        rows = [{"sweep": "not interrupted", "kills": 0, **whole}, {"sweep": "killed and continued", **killed}]
        tables = [read_table(folder / one / "sweep.csv") for one in ("whole", "killed")]
        summary = {
            "same_table": int(tables[0] == tables[1]),
            "federations": len({(row["defense"], row["strength"]) for row in tables[0]}),
            "attacks": len({row["attack"] for row in tables[0]}),
            "lines": len(tables[0]),
            "refused": sum(bool(row["refused"]) for row in tables[0]),
        }
    print_results("sweep", rows, summary, options)


def write_grid(options: Options, folder: Path) -> None:
    """Write the sweep's grid (grid.toml) and the experiment that it varies (base.toml) into `folder`."""
    defenses = list(DEFENSE_STRENGTHS.items())[: 3 if options.quick else None]
    attacks = list(ATTACK_ARGUMENTS.items())[: 2 if options.quick else None]
    lines = ['experiment = "base.toml"', f"seeds = [{options.seed}]", "attacked = { clients = 2 }", "[defenses]"]
    lines += [f"{name} = {strengths}" for name, strengths in defenses]
    lines += ["[attacks]", *(f"{name} = {{ {arguments} }}" for name, arguments in attacks), ""]
    (folder / "base.toml").write_text(EXPERIMENT_TOML)
    (folder / "grid.toml").write_text("\n".join(lines))


def run_interrupted(folder: Path, seconds: float) -> ResultRow:
    """Run a sweep that is killed `KILL_COUNT` times and then runs to its end, and return its row of the table.

    seconds: time from each start or continuation to the kill.
    The row has the wall and CPU time of all its processes, except the CPU time of killed workers; and how many federations were
    finished at each kill.
    """
    out, spent, cpu, finished = folder / "killed", 0.0, 0.0, []
    for _ in range(KILL_COUNT):
        one = run_sweep(folder, out, kill_after=seconds)
        spent, cpu = spent + one["seconds"], cpu + one["cpu_seconds"]
        finished.append(len(list(out.glob("*/sweep.json"))))
    last = run_sweep(folder, out, kill_after=None)
    total = {"seconds": spent + last["seconds"], "cpu_seconds": cpu + last["cpu_seconds"]}
    return {"kills": KILL_COUNT, **total, "finished": ", ".join(map(str, finished))}


def run_sweep(folder: Path, out: Path, *, kill_after: float | None) -> ResultRow:
    """Run `attacker sweep`, and return a dict with its wall time `seconds` and, with its workers, CPU time `cpu_seconds`.

    out: folder of the results; a sweep that was begun there is continued.
    kill_after: seconds after which the sweep and its workers are killed; None lets it run to its end. The CPU time of workers
                that are killed is not known, and is left out.
    Raises RuntimeError if the sweep fails by itself, or exits before `kill_after`.
    """
    started, before = monotonic(), _measure_children()
    code = "from attacker.cli import main; main()"
    command = [sys.executable, "-c", code, "sweep", str(folder / "grid.toml"), "--out", str(out), "--workers", str(WORKER_COUNT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(command, start_new_session=True, env=environment, stdout=subprocess.DEVNULL, cwd=folder)
    try:
        status = process.wait(timeout=kill_after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    expected = 0 if kill_after is None else -signal.SIGKILL
    if status != expected:
        raise RuntimeError(f"attacker sweep exited with status {status} instead of {expected}; see its output above")
    return {"seconds": monotonic() - started, "cpu_seconds": _measure_children() - before}


def _measure_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of sweep.csv, each as a dict from column to text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
