"""Comparison of our code with libraries that could replace it: cost, and behaviour when a process is killed.

The table `positions` packs the positions of a sparse update of 11 million values (ResNet-18) by our codec, Roaring bitmaps
(`pyroaring`), zlib and lzma over the gaps between positions, and by zlib over NumPy's bitmap. The table `queue` kills a process
with SIGKILL while it works on a job of our queue, of `persistqueue.SQLiteAckQueue` and of `huey.SqliteHuey`. For the first two,
it also tests whether a slow worker that was considered dead can still finish a job that another one has finished. The table
`pool` kills one worker while several tasks run, with our pool, `concurrent.futures.ProcessPoolExecutor` and `joblib`. Of
pyroaring, persist-queue and huey, those that are not installed are left out: pip install --target FOLDER pyroaring persist-queue
huey, and put FOLDER on PYTHONPATH.
"""

import os
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from lzma import compress, decompress
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from fedsim.recording.packing import positions as packed
from support.contract import Options, ResultRow

RESNET18_PARAMETERS = 11_173_962


def measure_positions(options: Options) -> list[ResultRow]:
    """Measure the size of packed positions relative to our codec, and the CPU-seconds to pack and unpack them.

    Returns a row for each codec and each share of values that are sent: 0.1, 1 and 10 %, at random positions.
    """
    size = RESNET18_PARAMETERS // 10 if options.quick else RESNET18_PARAMETERS
    rng = np.random.default_rng(options.seed)
    rows = []
    for share in (0.001, 0.01, 0.1):
        positions = np.sort(rng.choice(size, round(share * size), replace=False)).astype(np.int64)
        ours = None
        for way, (pack, unpack) in _list_codecs(size).items():
            started = process_time()
            content = pack(positions)
            middle = process_time()
            assert np.array_equal(unpack(content), positions), way
            seconds = process_time() - middle
            length = sum(t.nbytes for t in content.values()) if isinstance(content, dict) else len(content)
            ours = ours or length
            rows.append(
                {
                    "table": "positions",
                    "share": share,
                    "way": way,
                    "bits_each": 8 * length / len(positions),
                    "over_ours": length / ours,
                    "pack_seconds": middle - started,
                    "unpack_seconds": seconds,
                }
            )
    return rows


def _list_codecs(size: int) -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    def encode_gaps(positions: Any) -> bytes:
        return bytes(np.diff(positions, prepend=-1).astype(np.uint32).tobytes())

    def decode_gaps(content: bytes) -> Any:
        return np.cumsum(np.frombuffer(content, np.uint32).astype(np.int64)) - 1

    def encode_bitmap(positions: Any) -> bytes:
        truth = np.zeros(size, bool)
        truth[positions] = True
        return np.packbits(truth).tobytes()

    ways: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "ours": (lambda positions: packed.pack(positions, size), lambda content: packed.unpack(content, size)),
        "zlib of gaps": (
            lambda positions: zlib.compress(encode_gaps(positions)),
            lambda content: decode_gaps(zlib.decompress(content)),
        ),
        "lzma of gaps": (
            lambda positions: compress(encode_gaps(positions), preset=1),
            lambda content: decode_gaps(decompress(content)),
        ),
        "zlib of a bitmap": (
            lambda positions: zlib.compress(encode_bitmap(positions)),
            lambda content: np.flatnonzero(np.unpackbits(np.frombuffer(zlib.decompress(content), np.uint8))[:size]),
        ),
    }
    if find_spec("pyroaring"):
        from pyroaring import BitMap

        def encode_roaring(positions: Any) -> bytes:
            bits = BitMap(positions.astype(np.uint32))
            bits.run_optimize()
            return bytes(bits.serialize())

        ways["roaring"] = (encode_roaring, lambda content: np.asarray(BitMap.deserialize(content).to_array(), dtype=np.int64))
    return ways


NUM_JOBS = 20
QUEUE_PROGRAMS = {
    "ours": """
from attacker.service.jobs.job import JobSpec, Result
from attacker.service.jobs.queue import Queue
import os
queue = Queue(PATH / "queue.sqlite")
queue.recover("pid %d" % os.getpid())
if FILL:
    for number in range(JOBS): queue.submit(JobSpec.from_stored(
        {"recording": "r", "attack": "cpl", "arguments": {"n": number}, "clients": (), "rounds": "all", "seed": 0, "null": True}))
else:
    while (claim := queue.claim("pid %d" % os.getpid())) is not None:
        work(claim.spec.arguments["n"])
        queue.publish(claim, Result(attacks=()))
""",
    "persistqueue.SQLiteAckQueue": """
import persistqueue
queue = persistqueue.SQLiteAckQueue(str(PATH), auto_resume=True)
if FILL:
    for number in range(JOBS): queue.put(number)
else:
    while True:
        try: number = queue.get(block=False)
        except persistqueue.Empty: break
        work(number)
        queue.ack(number)
""",
    "huey.SqliteHuey": """
import huey
queue = huey.SqliteHuey(filename=str(PATH / "huey.db"))
@queue.task()
def job(number): work(number)
if FILL:
    for number in range(JOBS): job(number)
else:
    while (task := queue.dequeue()) is not None: queue.execute(task)
""",
}
JOB_PROGRAM = """
import os, signal, sys
from pathlib import Path
PATH, FILL, JOBS = Path(sys.argv[1]), sys.argv[2] == "fill", int(sys.argv[3])
def work(number):
    done = PATH / f"done-{number}"
    if number == JOBS // 2 and not (PATH / "killed").exists():
        (PATH / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    done.write_text(done.read_text() + "x" if done.exists() else "x")
"""


def measure_queues(options: Options) -> list[ResultRow]:
    """Count jobs that are lost, and jobs that are done twice, after a process was killed during a job and another continued.

    Returns a row for each queue. Column late_ends: a slow worker is taken for dead, and its job is given to a second worker; the
    number of these two workers that can mark the job as done, or None if this was not tested.
    """
    rows = []
    for name, program in QUEUE_PROGRAMS.items():
        if name != "ours" and find_spec(name.partition(".")[0]) is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", JOB_PROGRAM + program, folder]
            _run(*command, "fill", str(NUM_JOBS))
            killed = _run(*command, "work", str(NUM_JOBS), may_die=True) == -signal.SIGKILL
            _run(*command, "work", str(NUM_JOBS))
            done = [path.read_text() for path in Path(folder).glob("done-*")]
        row = {"table": "queue", "way": name, "killed": killed, "jobs": NUM_JOBS, "lost": NUM_JOBS - len(done)}
        rows.append(
            {
                **row,
                "twice": sum(len(text) > 1 for text in done),
                "late_ends": LATE_END_COUNTERS[name]() if name in LATE_END_COUNTERS else None,
            }
        )
    return rows


def _count_late_ends_of_ours() -> int:
    from attacker.service.jobs.job import JobSpec, Result
    from attacker.service.jobs.queue import Queue
    from attacker.service.jobs.queue_rows import StaleClaim

    with tempfile.TemporaryDirectory() as folder:
        queue, ended = Queue(Path(folder, "queue.sqlite")), 0
        queue.submit(JobSpec(recording="r", attack="cpl"))
        first = queue.claim("first")
        queue.recover("second")
        for claim in (queue.claim("second"), first):
            assert claim is not None
            with suppress(StaleClaim):
                queue.publish(claim, Result(attacks=()))
                ended += 1
        queue.close()
    return ended


def _count_late_ends_of_persistqueue() -> int:
    import persistqueue

    with tempfile.TemporaryDirectory() as folder:
        first = persistqueue.SQLiteAckQueue(folder, auto_resume=True)
        first.put("job")
        given = first.get(block=False)
        second = persistqueue.SQLiteAckQueue(folder, auto_resume=True)
        ended = [second.ack(second.get(block=False)), first.ack(given)]
    return sum(one is not None for one in ended)


LATE_END_COUNTERS = {"ours": _count_late_ends_of_ours, "persistqueue.SQLiteAckQueue": _count_late_ends_of_persistqueue}


NUM_TASKS = 8
POOL_PROGRAMS = {
    "concurrent.futures": """
from concurrent.futures import ProcessPoolExecutor
if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        futures = [pool.submit(work, number) for number in range(TASKS)]
    answered = sum(future.exception() is None for future in futures)
""",
    "joblib": """
from joblib import Parallel, delayed
if __name__ == "__main__":
    answered = 0
    try:
        for _ in Parallel(n_jobs=2, return_as="generator_unordered")(delayed(work)(n) for n in range(TASKS)): answered += 1
    except Exception as error: print(type(error).__name__)
""",
}
TASK_PROGRAM = """
import os, signal, sys, time
from pathlib import Path
TASKS = int(sys.argv[2])
def work(number):
    time.sleep(0.2)
    if number == 2 and not (Path(sys.argv[1]) / "killed").exists():
        (Path(sys.argv[1]) / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number
"""
OWN_POOL_PROGRAM = """
import sys, threading
from pathlib import Path
from attacker.replay.executors import process_pool
from attacker.replay.tasks import ReplayJob, Task, TaskCase
process_pool.WORKER_PROGRAM = Path(sys.argv[1], "worker.py").read_text()
job = ReplayJob(recording="", folder=sys.argv[1], attack="cpl", arguments={}, null=False, seed=0, device="cpu", threads=1)
tasks = [Task(members=(TaskCase(key=str(n), rows=()),)) for n in range(int(sys.argv[2]))]
print(sum(bool(outcome.done) for _, outcome in process_pool.run_tasks(job, tasks, 2, lambda *_: None)))
"""
OWN_WORKER_PROGRAM = """
import json, os, signal, time
from pathlib import Path
from attacker.replay.executors.worker_loop import serve
def prepare(channel):
    folder = Path(json.loads(channel.read())["folder"])
    def work(line):
        time.sleep(0.2)
        number = json.loads(line)["members"][0]["key"]
        if number == "2" and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"outcome": {"done": {number: "route"}, "failed": {}, "interrupted": False}}
    return work
serve(prepare)
"""


def measure_pools(options: Options) -> list[ResultRow]:
    """Count how many of `NUM_TASKS` tasks return their result if a worker process is killed once, during one task.

    Returns a row for each pool. Column answered: this number. If the pool's program did not print it, `answered` is the last word
    that the program printed or, if it printed nothing, the last line of its error. Column error: what the program printed before
    the number, such as the name of an exception.
    """
    rows = []
    for name in ("ours", *POOL_PROGRAMS):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "worker.py").write_text(OWN_WORKER_PROGRAM)
            script = Path(folder, "pool.py")
            script.write_text(
                OWN_POOL_PROGRAM if name == "ours" else TASK_PROGRAM + POOL_PROGRAMS[name] + "    print(answered)\n"
            )
            done = subprocess.run(
                [sys.executable, str(script), folder, str(NUM_TASKS)],
                capture_output=True,
                text=True,
                timeout=300,
                env=_make_environment(),
            )
            words = done.stdout.split() or [done.stderr.strip().splitlines()[-1]]
            rows.append(
                {
                    "table": "pool",
                    "way": name,
                    "tasks": NUM_TASKS,
                    "answered": int(words[-1]) if words[-1].isdigit() else words[-1],
                    "error": " ".join(words[:-1]),
                }
            )
    return rows


def _make_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path[1:]))}


def _run(*command: str, may_die: bool = False) -> int:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=_make_environment())
    if done.returncode and not may_die:
        raise RuntimeError(done.stderr)
    return done.returncode


LIBRARY_TABLES: dict[str, Callable[[Options], list[ResultRow]]] = {
    "positions": measure_positions,
    "queue": measure_queues,
    "pool": measure_pools,
}
