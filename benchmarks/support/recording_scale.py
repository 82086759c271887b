"""The cost of recording by number of clients and rounds: 1,000 clients in one process, 100 on Ray, and queries of the index."""

import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from defenses import DefenseSpec
from fedsim.config.experiment import Experiment, validate
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.recording import DataSpec, Manifest, ModelSpec, Recorder, Recording, Reply, Training
from support.contract import Options, print_results


def _read_resident_memory() -> float:
    """Return the resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def make_small_experiment(clients: int, rounds: int, seed: int) -> Experiment:
    training = {"learning_rate": 0.1, "batch_size": 1, "steps": 1}
    model = {"name": "mlp", "hidden": [16]}
    raw = {"seed": seed, "rounds": rounds, "model": model, "data": "digits", "clients": {"count": clients}, "training": training}
    return validate(raw, source="benchmark")


def _federate(kind: str, clients: int, rounds: int, seed: int, out: Path) -> dict[str, Any]:
    seconds: list[float] = []
    memory: list[float] = []

    def note_round(row: dict[str, Any]) -> None:
        seconds.append(row["seconds"])
        memory.append(_read_resident_memory())
        print(f"\r{kind}: round {row['round']} of {rounds}", end="", file=sys.stderr)

    engine.set_verbosity(False)
    run = FederationRun(experiment=make_small_experiment(clients, rounds, seed), out=out, device="cpu", client_seed=seed)
    engine.run(run, engine=kind, on_round=note_round)  # type: ignore[arg-type]
    print(file=sys.stderr)
    warm = max(1, min(10, rounds // 4))  # after the first rounds: identities, caches, actors
    quarter = max(1, (rounds - warm) // 4)
    first, last = seconds[1 + warm : 1 + warm + quarter], seconds[-quarter:]
    return {
        "engine": kind,
        "clients": clients,
        "rounds": rounds,
        "ms_per_message": 1000 * median(seconds[1 + warm :]) / clients,
        "time_growth": median(last) / median(first),
        "memory_mb": memory[-1],
        "memory_growth": memory[-1] / memory[warm],
    }


def _write_indexed(folder: Path, clients: int, rounds: int) -> Recording:
    """Write and return a recording with an index of many clients and rounds, but without updates."""
    spec, training = DataSpec(shape=(2,), num_classes=2), Training(learning_rate=0.1, batch_size=1, steps=1)
    manifest = Manifest(
        name="index", model=ModelSpec(name="mlp"), data=spec, training=training, defense=DefenseSpec(), software={}
    )
    recorder, names = Recorder(folder, manifest), [f"{number:012x}" for number in range(clients)]
    for number in range(1, rounds + 1):
        recorder.record_sent(number, {"w": torch.zeros(1)})
        for name in names:
            recorder.record_reply(number, Reply(client=name, node=name, status="failed", reason="no payload", metrics={"x": 0.5}))
        recorder.commit(number, names)
    return Recording(folder)


def _measure_queries(recording: Recording) -> tuple[int, float]:
    """Return the number of replies in the index, and the CPU time of the slowest of three kinds of query in milliseconds.

    The time of a query is the median of eleven repetitions.
    """
    counts, clients = recording.count_replies(), recording.list_clients()
    rounds, rng = [own.round for own in counts], np.random.default_rng(0)
    kinds = {
        "of a round": lambda: recording.read_rows(rounds={int(rng.choice(rounds))}),
        "of a client": lambda: recording.read_rows(clients={str(rng.choice(clients))}),
        "of both": lambda: recording.read_rows(rounds={int(rng.choice(rounds))}, clients={str(rng.choice(clients))}),
    }
    slowest = 0.0
    for ask in kinds.values():
        took = []
        for _ in range(11):
            began = time.process_time()
            assert ask()
            took.append(time.process_time() - began)
        slowest = max(slowest, 1000 * median(took))
    return sum(own.complete + own.failed + own.late for own in counts), slowest


def measure_scale(options: Options) -> None:
    torch.set_num_threads(1)
    clients, rounds, actors, exchanges = (200, 24, 20, 12) if options.quick else (1000, 200, 100, 60)
    with tempfile.TemporaryDirectory() as scratch:
        rows = [_federate("local", clients, rounds, options.seed, Path(scratch) / "local")]
        observations, query = _measure_queries(_write_indexed(Path(scratch) / "index", 1000, 100))
        rows.append(_federate("ray", actors, exchanges, options.seed, Path(scratch) / "ray"))
    summary = {
        "time_growth": max(row["time_growth"] for row in rows),
        "memory_growth": max(row["memory_growth"] for row in rows),
        "query_ms": query,
        "observations": observations,
    }
    print_results("recording --scale", rows, summary, options)
