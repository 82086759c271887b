"""Workers that are short scripts, the journal of the tasks that they get, and waiting for their jobs."""

from collections.abc import Callable
from pathlib import Path

from processes import wait_until

from attacker.service.jobs.job import FINAL_STATES, Job, JobSpec
from attacker.service.jobs.queue import Queue

TIME_LIMIT = 90.0
"""Time limit in seconds, generous for busy machines."""
SPEC = JobSpec(recording="photos", attack="cpl")
WORKER = """
import json, os, signal, sys, time
out = os.fdopen(os.dup(1), "w")
def say(**said):
    out.write(json.dumps(said) + "\\n")
    out.flush()
def answer(state="done", error=None, **result):
    say(answer={"state": state, "result": result, "error": error})
BEFORE
say(ready=True)
for line in sys.stdin:
    task = json.loads(line)
    with open(JOURNAL, "a") as journal:
        print(os.getpid(), task["job"], task["spec"]["seed"], file=journal, flush=True)
"""


def program(tmp_path: Path, before: str = "") -> str:
    return WORKER.replace("JOURNAL", repr(str(tmp_path / "journal"))).replace("BEFORE", before)


def wait_for_end(queue: Queue, job: Job) -> Job:
    return wait_for_job(queue, job, lambda now: now.state in FINAL_STATES)


def wait_for_job(queue: Queue, job: Job, reached: Callable[[Job], bool]) -> Job:
    wait_until(lambda: reached(queue.get(job.id)), lambda: queue.get(job.id), seconds=TIME_LIMIT)
    return queue.get(job.id)


def journal(tmp_path: Path) -> list[list[str]]:
    path = tmp_path / "journal"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []
