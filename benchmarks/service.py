"""Measurements of the service: reads while an attack runs, memory over many requests, a live federation, and jobs after kills.

All of it runs in one service (`attacker serve`) over one folder of recordings.
"""

import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from support.contract import parse_options, print_results
from support.service.client import ServiceProcess, run_load

from attacker.attacks import AttackSpec
from attacker.replay.replay import Replay
from attacker.scoring import Scorer
from fedsim.config.experiment import validate
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording

API_PREFIX = "/api/v1"
ONE_STEP_TRAINING = {"learning_rate": 0.01, "batch_size": 1, "steps": 1}
SCORED_EXPERIMENT: dict[str, Any] = {
    "rounds": 3,
    "model": "lenet_cpl",
    "data": {"name": "photos", "size": 32},
    "clients": {"count": 8},
    "training": ONE_STEP_TRAINING,
}
NUM_TINY_CLIENTS = 2
TINY_EXPERIMENT: dict[str, Any] = {
    "rounds": 1,
    "model": {"name": "mlp", "hidden": [8]},
    "data": "digits",
    "clients": {"count": NUM_TINY_CLIENTS},
    "training": {"learning_rate": 0.1, "batch_size": 1, "steps": 1},
}
LIVE_EXPERIMENT = """
seed = 0
rounds = {rounds}
model = {{ name = "mlp", hidden = [32] }}
data = {{ name = "photos", size = 32 }}
clients = {{ count = 20 }}
training = {{ learning_rate = 0.01, batch_size = 1, steps = 1 }}
"""
RULES_FILE_TEXT = """
[[rule]]
name = "live"
attack = "exact"
recordings = ["live"]
null = false
priority = 5
"""
ENDLESS_JOB = {"recording": "scored", "attack": "inverting_gradients", "arguments": {"steps": 1_000_000}, "null": False}
TIMEOUT_SECONDS = 1800.0
FINAL_STATES = ("done", "failed", "cancelled", "set_aside")
"""Final states of a job."""


def federate(raw: dict[str, Any], out: Path) -> None:
    engine.set_verbosity(False)
    engine.run(FederationRun(experiment=validate(raw, source="benchmark"), out=out, client_seed=0), engine="local")


def attack_and_score(run: Path) -> None:
    recording, scorer = Recording(run / "recording"), Scorer(run, [run / "truth"])
    for null in (False, True):
        replay = Replay(recording=recording, spec=AttackSpec(name="exact", null=null), out=run / "reconstructions", threads=1)
        scorer.score(replay.run().folder)


def list_paths(service: ServiceProcess) -> list[str]:
    """Return paths that the service's page requests while a user watches a recording: lists, one case, and one image."""
    run = f"{API_PREFIX}/recordings/scored"
    source = next(one["source"] for one in service.ask(f"{run}/attacks")["items"] if not one["null"])
    cases = service.list_items(f"{run}/cases?attack={source}")
    detail = f"{run}/cases/{source}/{cases[0]['case']}"
    image = service.ask(detail)["examples"][0]["image"]
    lists = [
        f"{API_PREFIX}/recordings",
        f"{API_PREFIX}/jobs",
        run,
        f"{run}/grid?attack={source}",
        f"{run}/observations",
        f"{run}/leakage",
    ]
    return [*lists, f"{run}/cases?attack={source}", f"{run}/training", detail, image]


def measure_reads(service: ServiceProcess, seconds: float) -> list[dict[str, Any]]:
    """Return latencies of reads in ms during an attack, one row per load: 200 reads a second, and as many as 4 clients can send.

    seconds: duration of each load. The attack is started here and is still running afterwards, so that the caller must cancel it.
    """
    job = service.ask(f"{API_PREFIX}/jobs", ENDLESS_JOB)["id"]
    while not service.ask(f"{API_PREFIX}/jobs/{job}")["progress"]["share"]:
        time.sleep(0.2)
    paths, rows = list_paths(service), []
    for rate in (200.0, None):
        each, elapsed = run_load(service, paths, seconds=seconds, rate=rate)
        taken = np.array(each) * 1e3
        p50, p99 = np.percentile(taken, [50, 99])
        what = "reads at 200 a second" if rate else "reads as fast as 4 clients can"
        rows.append({"what": what, "per_second": len(taken) / elapsed, "p50_ms": p50, "p99_ms": p99, "max_ms": taken.max()})
    assert service.ask(f"{API_PREFIX}/jobs/{job}")["state"] == "running"
    return rows


def measure_memory(service: ServiceProcess, requests: int) -> dict[str, Any]:
    """Measure the growth of the service's resident memory over `requests` requests, after `requests` / 10 to warm up.

    `growth` is the memory at the end divided by the memory after the warm-up, without worker processes. `requests` in the row is
    the number of all requests, also those of the warm-up.
    """
    paths = list_paths(service)
    sizes, count = [], 0
    for share in (0.1, 1.0):
        until = count + share * requests
        while count < until:
            count += len(run_load(service, paths, seconds=min(10.0, (until - count) / 150 + 0.2), rate=None)[0])
        sizes.append(service.read_megabytes())
    return {"what": f"memory over {requests} requests", "requests": count, "mb": sizes[1], "growth": sizes[1] / sizes[0]}


def measure_lag(service: ServiceProcess, root: Path, rounds: int) -> dict[str, Any]:
    """Measure by how many rounds attacks lag behind a running federation of 20 clients.

    A rule of the service (see docs/service.md) starts an attack on each round when it is recorded. root: folder of recordings.
    rounds: length of the federation.
    Returns a row. round_s: median time from one recorded round to the next. attacked_after_s, at_most_s: median and longest time
    from the recording of a round to the end of its attack. behind_at_most: largest number of recorded rounds whose attack was not
    finished. behind_at_end: this number when the last round was recorded. Times are in seconds.
    Raises RuntimeError if the federation exits with an error.
    """
    experiment = root.parent / "live.toml"
    experiment.write_text(LIVE_EXPERIMENT.format(rounds=rounds))
    code = "from fedsim.cli import main; main()"
    command = [sys.executable, "-c", code, "run", str(experiment), "--engine", "ray", "--out", str(root / "live")]
    log = root.parent / "live.log"
    with log.open("w") as words:
        federation = subprocess.Popen(command, stderr=words, stdout=words)
    lags, there, done, at_end = [0], dict[int, float](), dict[int, float](), None
    try:
        while len(done) < rounds:
            if status := federation.poll():
                raise RuntimeError(f"the federation exited with status {status}; its output ends with\n{log.read_text()[-3000:]}")
            now = time.perf_counter()
            for n in list_rounds(root / "live"):
                there.setdefault(n, now)
            for job in service.list_items(f"{API_PREFIX}/jobs?recording=live&state=done"):
                done.setdefault(int(job["spec"]["rounds"]), time.perf_counter())
            lags.append(len(there) - len(done))
            # the last round has just been recorded; at best, only it is not attacked yet
            if len(there) == rounds and at_end is None:
                at_end = lags[-1]
            time.sleep(0.1)
    finally:
        federation.kill()
        federation.wait()
    gaps = np.diff(sorted(there.values()))
    waits = [done[n] - there[n] for n in there]
    return {
        "what": f"live, 20 clients, {rounds} rounds",
        "round_s": float(np.median(gaps)),
        "attacked_after_s": float(np.median(waits)),
        "at_most_s": max(waits),
        "behind_at_end": at_end or 0,
        "behind_at_most": max(lags),
    }


def list_rounds(run: Path) -> list[int]:
    """Return the numbers of the rounds that a recording contains so far; an empty list if it has not begun."""
    with suppress(ValueError, OSError):
        return Recording(run / "recording").list_rounds()
    return []


def is_answered(root: Path, job: dict[str, Any]) -> bool:
    """Return whether each attack that a finished job of the durability test reports has the files of all clients on disk."""
    folders = [root / job["spec"]["recording"] / "reconstructions" / one["source"] for one in job["result"]["attacks"]]
    return all(len(list(folder.glob("*.safetensors"))) == NUM_TINY_CLIENTS for folder in folders)


def is_kill_allowed(left: list[dict[str, Any]]) -> bool:
    """Return whether a worker may be killed: only if no unfinished job (`left`) has a recorded crash.

    Then no job crashes three times, after which the service would give it up ("set aside").
    """
    return not any(job["crashes"] for job in left)


def count_lost(root: Path, ids: list[str], jobs: list[dict[str, Any]]) -> int:
    """Return the number of jobs of `ids` that are lost: unknown, unfinished, failed, cancelled, or done without results on disk.

    Jobs that the service set aside after repeated crashes are not counted here. jobs: what the service lists.
    """
    kept = {job["id"] for job in jobs if job["state"] == "set_aside" or (job["state"] == "done" and is_answered(root, job))}
    return len(set(ids) - kept)


def measure_durability(service: ServiceProcess, count: int, seed: int) -> dict[str, Any]:
    """Run `count` attack jobs, while the service is killed three times and its workers now and then, and count lost jobs.

    seed: of the random times, and of the choice of the workers that are killed. After `TIMEOUT_SECONDS`, unfinished jobs count as
    lost.
    Returns a row with numbers of jobs. lost: see `count_lost`. set_aside: given up by the service after repeated crashes. twice:
    finished a second time after they were done. begun_again: started more than once.
    """
    spec = {"recording": "tiny", "attack": "exact", "null": False}
    ids = [service.ask(f"{API_PREFIX}/jobs", {**spec, "seed": number})["id"] for number in range(count)]
    draw, first, kills, killed, begun = random.Random(seed), dict[str, tuple[str, int]](), 0, 0, time.perf_counter()
    twice: set[str] = set()
    while True:
        jobs = [job for job in service.list_items(f"{API_PREFIX}/jobs?recording=tiny") if job["id"] in set(ids)]
        done = {job["id"]: (job["ended"], job["attempts"]) for job in jobs if job["state"] == "done"}
        twice |= {id for id, how in done.items() if first.setdefault(id, how) != how}
        left = [job for job in jobs if job["state"] not in FINAL_STATES]
        if (len(jobs) == count and not left) or time.perf_counter() - begun > TIMEOUT_SECONDS:
            break
        if kills < 3 and len(done) >= count * (kills + 1) / 4:
            kills += 1
            service.kill()
            service.start()
        elif draw.random() < 0.15 and killed <= kills and is_kill_allowed(left) and service.list_workers():
            killed += 1
            subprocess.run(["kill", "-9", str(draw.choice(service.list_workers()))], check=False, stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.1, 0.5))
    return {
        "what": f"{count} jobs, {kills} kills of the service, {killed} of workers",
        "seconds": time.perf_counter() - begun,
        "lost": count_lost(service.root, ids, jobs),
        "set_aside": sum(job["state"] == "set_aside" for job in jobs),
        "twice": len(twice),
        "begun_again": sum(job["attempts"] > 1 for job in jobs),
    }


def main() -> None:
    options = parse_options(__doc__ or "")
    seconds, requests, rounds, count = (4.0, 500, 4, 30) if options.quick else (30.0, 10_000, 60, 1000)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # SystemExit also ends the service
    with tempfile.TemporaryDirectory(prefix="service-", ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "root"
        root.mkdir()
        (root.parent / "rules.toml").write_text(RULES_FILE_TEXT)
        federate(SCORED_EXPERIMENT, root / "scored")
        federate(TINY_EXPERIMENT, root / "tiny")
        attack_and_score(root / "scored")
        service = ServiceProcess(root, "--workers", "1", "--truth", "own", "--rules", str(root.parent / "rules.toml"))
        try:
            print("reads while an attack runs", file=sys.stderr)
            rows = [*measure_reads(service, seconds), measure_memory(service, requests)]
            (job,) = service.list_items(f"{API_PREFIX}/jobs?state=running")
            service.ask(f"{API_PREFIX}/jobs/{job['id']}/cancel", {})
            while service.ask(f"{API_PREFIX}/jobs/{job['id']}")["state"] == "running":
                time.sleep(0.1)
            print("a live federation", file=sys.stderr)
            rows.append(measure_lag(service, root, rounds))
            print("jobs and kills", file=sys.stderr)
            rows.append(measure_durability(service, count, options.seed))
        finally:
            service.kill()
    paced, fast, grown, lag, survived = rows
    summary = {
        "reads_per_second": fast["per_second"],
        "p99_ms": paced["p99_ms"],
        "jobs_lost": survived["lost"],
        "jobs_set_aside": survived["set_aside"],
        "jobs_published_twice": survived["twice"],
        "memory_growth": grown["growth"],
        "live_lag_rounds": lag["behind_at_end"],
    }
    print_results("service", rows, summary, options)


if __name__ == "__main__":
    main()
