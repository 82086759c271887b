"""Tests of the supervisor of workers: jobs and workers end properly, whatever a worker does. The workers are scripts."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import is_alive, wait_until
from publications import list_publications
from scripted_workers import SPEC, journal, program, wait_for_end, wait_for_job

from attacker.service.jobs.queue import Limits, Queue
from attacker.service.settings import ServiceSettings
from attacker.service.supervisor import job_worker
from attacker.service.supervisor import running_job as running
from attacker.service.supervisor.supervisor import Supervisor

Work = Callable[..., Supervisor]


@pytest.fixture
def work(settings: ServiceSettings, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Function that starts a supervisor, whose workers run the code `before` at their start, and `lines` for each task."""
    supervisors = []

    def start(lines: str, before: str = "", **changed: object) -> Supervisor:
        body = "".join(f"    {line}\n" for line in lines.strip().splitlines())
        monkeypatch.setattr(job_worker, "WORKER_PROGRAM", program(tmp_path, before) + body)
        supervisor = Supervisor(ServiceSettings(**{**vars_of(settings), **changed}), queue)
        supervisor.start()
        supervisors.append(supervisor)
        return supervisor

    yield start
    for supervisor in supervisors:
        supervisor.stop()


def vars_of(settings: ServiceSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def test_result_is_published_and_the_worker_does_the_next_job(queue: Queue, work: Work, tmp_path: Path) -> None:
    jobs = [queue.submit(SPEC) for _ in range(3)]
    work('say(progress={"share": 0.5, "words": "half"})\nanswer(scored=True)')
    done = [wait_for_end(queue, job) for job in jobs]
    assert [(job.state, job.attempts) for job in done] == [("done", 1)] * 3
    assert done[0].result.scored
    assert list_publications(queue) == {job.id: 1 for job in jobs}
    assert len({pid for pid, *_ in journal(tmp_path)}) == 1


def test_each_worker_serves_one_recording(queue: Queue, work: Work, tmp_path: Path) -> None:
    jobs = [queue.submit(SPEC.model_copy(update={"recording": name})) for name in ("photos", "other", "other", "photos")]
    work("answer()")
    for job in jobs:
        wait_for_end(queue, job)
    pids = [int(pid) for pid, *_ in journal(tmp_path)]
    assert pids[1] == pids[2]
    assert len(set(pids)) == 3
    assert not any(map(is_alive, pids[:3])), "no more workers are kept than there may be"


def test_number_of_running_jobs_is_limited_by_workers(queue: Queue, work: Work, tmp_path: Path) -> None:
    jobs, seen = [queue.submit(SPEC) for _ in range(6)], set[int]()
    work(f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\nanswer()", workers=2)

    def looked(state: str, count: int) -> bool:
        counts = queue.count_states()
        seen.add(counts["running"])
        return counts[state] == count

    wait_until(lambda: looked("running", 2), "two workers, and not two jobs")
    wait_until(lambda: len(journal(tmp_path)) == 2, "not both have begun")
    (tmp_path / "go").touch()
    wait_until(lambda: looked("done", len(jobs)), "not all jobs are done")
    assert max(seen) == 2


def test_job_that_kills_its_workers_is_set_aside(queue: Queue, work: Work, tmp_path: Path) -> None:
    bad, good = queue.submit(SPEC.model_copy(update={"seed": 13})), queue.submit(SPEC)
    work(
        """
if task["spec"]["seed"] == 13:
    print("Traceback: segmentation", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
answer()
"""
    )
    aside = wait_for_end(queue, bad)
    assert (aside.state, aside.attempts, aside.crashes) == ("set_aside", 3, 3)
    assert "SIGSEGV" in aside.error
    assert "Traceback: segmentation" in aside.error
    assert wait_for_end(queue, good).state == "done"
    assert [job for _, job, _ in journal(tmp_path)].count(bad.id) == 3


def test_error_holds_the_stderr_of_its_job_only(queue: Queue, work: Work) -> None:
    queue.limits = Limits(crashes=1)  # so that the error is that of the worker that has done another job
    quiet, bad = queue.submit(SPEC), queue.submit(SPEC.model_copy(update={"seed": 13}))
    work(
        """
print("seed", task["spec"]["seed"], file=sys.stderr, flush=True)
if task["spec"]["seed"]:
    os._exit(3)
answer()
"""
    )
    assert wait_for_end(queue, quiet).state == "done"
    error = wait_for_end(queue, bad).error
    assert "seed 13" in error
    assert "seed 0" not in error


@pytest.mark.parametrize(
    "lines",
    [
        'out.write("no json\\n"); out.flush(); time.sleep(60)',
        'say(answer={"state": "queued", "result": {}})\ntime.sleep(60)',
        'say(answer={"state": "done", "result": {}, "job": "another"})\ntime.sleep(60)',
        'out.write("x" * 5_000_000); out.flush(); time.sleep(60)',
    ],
)
def test_worker_with_invalid_messages_is_ended(queue: Queue, work: Work, lines: str) -> None:
    job = queue.submit(SPEC)
    work(lines)
    now = wait_for_end(queue, job)
    assert now.state == "set_aside"
    assert "invalid message" in (now.error or "")


def test_failed_job_has_a_reason_and_is_not_repeated(queue: Queue, work: Work, tmp_path: Path) -> None:
    job, gone = queue.submit(SPEC), queue.submit(SPEC.model_copy(update={"recording": "gone"}))
    work('answer("failed", error="no such round\\n\\nTraceback ...")')
    now = wait_for_end(queue, job)
    assert (now.state, now.attempts, now.error) == ("failed", 1, "no such round\n\nTraceback ...")
    assert "no recording 'gone'" in (wait_for_end(queue, gone).error or "")
    assert len(journal(tmp_path)) == 1


ENDLESS_TASK = """
say(progress={"share": 0.1, "words": ""})
while True: time.sleep(1)
"""
ANSWER_INTERRUPT = """
def report_best(*_):
    answer("interrupted", score_note="best so far")
    while True: time.sleep(1)
signal.signal(signal.SIGINT, report_best)
"""
IGNORE_INTERRUPT = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


def test_cancelled_running_job_keeps_its_best_so_far(queue: Queue, work: Work, tmp_path: Path) -> None:
    job = queue.submit(SPEC)
    work(ENDLESS_TASK, ANSWER_INTERRUPT)
    wait_for_job(queue, job, lambda now: now.progress.share > 0)
    queue.cancel(job.id)
    now = wait_for_end(queue, job)
    assert (now.state, now.crashes) == ("cancelled", 0)
    assert now.result.score_note == "best so far"
    assert list_publications(queue) == {}
    pid = int(journal(tmp_path)[0][0])
    wait_until(lambda: not is_alive(pid), "the signal may still be on its way: no other job may meet it")


def test_job_beyond_its_time_fails_and_keeps_its_best_so_far(queue: Queue, work: Work) -> None:
    job = queue.submit(SPEC)
    work(ENDLESS_TASK, ANSWER_INTERRUPT, job_seconds=0.5)
    now = wait_for_end(queue, job)
    assert now.state == "failed"
    assert "longer than" in (now.error or "")
    assert now.result.score_note == "best so far"


@pytest.mark.parametrize("reason", ["cancelled", "failed"])
def test_worker_that_ignores_the_interrupt_is_killed(
    queue: Queue, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(running, "SAVE_SECONDS", 0.3)
    job = queue.submit(SPEC)
    work(ENDLESS_TASK, IGNORE_INTERRUPT, **({"job_seconds": 0.3} if reason == "failed" else {}))
    if reason == "cancelled":
        wait_for_job(queue, job, lambda now: now.progress.share > 0)
        queue.cancel(job.id)
    now = wait_for_end(queue, job)
    assert (now.state, now.attempts, now.crashes) == (reason, 1, 0)
    wait_until(lambda: not any(is_alive(int(pid)) for pid, *_ in journal(tmp_path)), "it lives on")


@pytest.mark.parametrize("whose", ["its own", "its child's"])
def test_job_beyond_its_memory_fails_and_is_not_repeated(queue: Queue, work: Work, whose: str) -> None:
    hog = "x = bytearray(400_000_000); time.sleep(60)"
    lines = (
        hog if whose == "its own" else f"import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; {hog}']).wait()"
    )
    job = queue.submit(SPEC)
    work(lines, job_megabytes=200)
    now = wait_for_end(queue, job)
    assert (now.state, now.attempts) == ("failed", 1)
    assert "MB of memory, and a job may take 200" in (now.error or "")


LEAKING_TASK = """
left = globals().setdefault("left", [])
if left:  # by an earlier job
    x = bytearray(120_000_000)
    time.sleep(60)
left.append(bytearray(120_000_000 if task["spec"]["seed"] < 2 else 400_000_000))
if task["spec"]["seed"] == 2:
    time.sleep(60)
answer()
"""


def test_memory_left_by_an_earlier_job_does_not_count(queue: Queue, work: Work, tmp_path: Path) -> None:
    first, second, large = (queue.submit(SPEC.model_copy(update={"seed": seed})) for seed in range(3))
    work(LEAKING_TASK, job_megabytes=200)
    assert [(now.state, now.attempts, now.crashes) for now in (wait_for_end(queue, first), wait_for_end(queue, second))] == [
        ("done", 1, 0),
        ("done", 2, 0),
    ]
    now = wait_for_end(queue, large)
    assert (now.state, now.attempts, now.crashes) == ("failed", 2, 0), "one that a fresh worker shows to be too large"
    assert "MB of memory, and a job may take 200" in (now.error or "")
    pids = [int(pid) for pid, *_ in journal(tmp_path)]
    assert [pids.index(pid) for pid in pids] == [0, 0, 2, 2, 4], "the first two share a worker, and so do the next two"
    assert list_publications(queue) == {first.id: 1, second.id: 2}


def test_job_of_a_stopped_service_is_queued_again(queue: Queue, work: Work, tmp_path: Path) -> None:
    job = queue.submit(SPEC)
    supervisor = work(ENDLESS_TASK)
    wait_for_job(queue, job, lambda now: now.progress.share > 0)
    supervisor.stop()
    now = queue.get(job.id)
    assert (now.state, now.crashes) == ("queued", 0)
    assert not is_alive(int(journal(tmp_path)[0][0]))
    work("answer()")
    assert (wait_for_end(queue, job).state, list_publications(queue)) == ("done", {job.id: 2})


def test_only_one_service_uses_a_state_folder(work: Work) -> None:
    work("answer()")
    with pytest.raises(ValueError, match="another process is working"):
        work("answer()")


def test_the_processor_time_of_a_job_is_counted(queue: Queue, work: Work) -> None:
    from attacker.service.jobs.rule_history import RecordingIdentity, RuleHistory, TakenRound

    ledger, photos = RuleHistory(queue), RecordingIdentity("photos", "a")
    first = ledger.take("busy", photos, [TakenRound(1, 1)], SPEC.model_copy(update={"seed": 1}))
    second = ledger.take("lazy", photos, [TakenRound(1, 1)], SPEC)
    assert first is not None
    assert second is not None
    work("until = time.process_time() + task['spec']['seed']\nwhile time.process_time() < until: pass\nanswer()")
    wait_for_end(queue, first), wait_for_end(queue, second)
    assert 0.9 < ledger.sum_cpu_seconds("busy", photos) < 2.0
    assert ledger.sum_cpu_seconds("lazy", photos) < 0.2, "the same worker, but not the same job"


def test_result_is_published_after_a_full_disk(queue: Queue, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlite3 import OperationalError

    publish, tries = queue.publish, []

    def full(*arguments: object, **options: object) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OperationalError("database or disk is full")
        publish(*arguments, **options)

    monkeypatch.setattr(queue, "publish", full)
    job = queue.submit(SPEC)
    work("answer()")
    now = wait_for_end(queue, job)
    assert (now.state, now.attempts, len(tries)) == ("done", 1, 2)


@pytest.mark.parametrize("what", ["the end of a job that cannot be begun", "a folder that cannot be read", "a worker"])
def test_job_is_not_lost_if_its_start_fails_once(
    queue: Queue, work: Work, settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from sqlite3 import OperationalError

    from attacker.service.supervisor import idle_workers
    from attacker.service.supervisor import supervisor as module

    tries = []

    def once(real: Callable[..., object], error: Exception) -> Callable[..., object]:
        def trying(*arguments: object, **options: object) -> object:
            tries.append(1)
            if len(tries) == 1:
                raise error
            return real(*arguments, **options)

        return trying

    if what == "a worker":
        monkeypatch.setattr(idle_workers, "JobWorker", once(idle_workers.JobWorker, RuntimeError("can't start new thread")))
    elif what == "a folder that cannot be read":
        monkeypatch.setattr(module, "make_run_path", once(module.make_run_path, OSError(5, "Input/output error")))
    else:
        (settings.root / "photos").rmdir()
        monkeypatch.setattr(queue, "end_failed", once(queue.end_failed, OperationalError("database or disk is full")))
    job = queue.submit(SPEC)
    work("answer()")
    now = wait_for_end(queue, job)
    assert (now.state, now.attempts) == ("failed" if what.startswith("the end") else "done", 1)
    assert len(tries) == 2
