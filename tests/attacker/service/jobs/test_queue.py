"""Tests of the queue of jobs: states, owners and attempts, priorities, limits, crashes, and concurrent processes."""

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from publications import list_publications

from attacker.service.jobs.job import JOB_STATES, JobProgress, JobSpec, ReplaySummary, Result
from attacker.service.jobs.queue import Limits, Queue, TooManyJobs, WrongJobState
from attacker.service.jobs.queue_rows import Claim, StaleClaim, UnknownJob
from attacker.service.jobs.rule_history import RecordingIdentity, RuleHistory, TakenRound

SPEC = JobSpec(recording="photos", attack="cpl")
RESULT = Result(attacks=(ReplaySummary(source="cpl-0011aabb", null=False, done=2, skipped=0, routes={"optimisation": 2}),))


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    queue = Queue(tmp_path / "queue.sqlite", Limits(max_queued=20))
    yield queue
    queue.close()


def claim_job(queue: Queue, owner: str = "me") -> Claim:
    claim = queue.claim(owner)
    assert claim is not None
    return claim


def test_job_goes_from_queued_to_done_with_its_facts(queue: Queue) -> None:
    spec = JobSpec(
        recording="group~photos", attack="exact", arguments={"route": "linear"}, rounds="1-3,7", clients=["a"], null=False
    )
    job = queue.submit(spec, origin="rule first")
    assert (job.state, job.attempts, job.origin, job.spec) == ("queued", 0, "rule first", spec)
    claim = claim_job(queue)
    assert (claim.id, claim.attempt, claim.spec) == (job.id, 1, spec)
    queue.save_progress(claim, JobProgress(share=0.25, words="1 of 4"))
    running = queue.get(job.id)
    assert (running.state, running.progress.share, running.progress.words) == ("running", 0.25, "1 of 4")
    queue.publish(claim, RESULT)
    done = queue.get(job.id)
    assert (done.state, done.result, done.progress.share, done.crashes) == ("done", RESULT, 1.0, 0)
    assert done.created <= done.started <= done.ended
    assert list_publications(queue) == {job.id: 1}


def test_jobs_are_claimed_by_priority_and_age(queue: Queue) -> None:
    ids = [queue.submit(SPEC.model_copy(update={"priority": priority})).id for priority in (0, 1, -1, 1, 0)]
    order = [claim_job(queue).id for _ in ids]
    assert order == [ids[1], ids[3], ids[0], ids[4], ids[2]]
    assert queue.claim("me") is None


def test_number_of_queued_jobs_is_limited(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "q.sqlite", Limits(max_queued=2))
    first, _ = queue.submit(SPEC), queue.submit(SPEC)
    with pytest.raises(TooManyJobs, match="2 jobs wait"):
        queue.submit(SPEC)
    claim_job(queue)
    queue.submit(SPEC)
    queue.cancel(first.id)
    queue.release(Claim(id=first.id, attempt=1, owner="me", spec=SPEC))
    with pytest.raises(TooManyJobs):
        queue.retry(first.id)
    queue.close()


def test_messages_of_an_older_attempt_are_refused(queue: Queue) -> None:
    job = queue.submit(SPEC)
    old = claim_job(queue, "killed")
    assert queue.recover("new") == 1
    new = claim_job(queue, "new")
    assert (new.id, new.attempt) == (job.id, 2)
    for say in (
        lambda: queue.save_progress(old, JobProgress(share=0.9)),
        lambda: queue.publish(old, RESULT),
        lambda: queue.end_failed(old, "late"),
        lambda: queue.end_cancelled(old),
        lambda: queue.end_crashed(old, "late"),
        lambda: queue.release(old),
    ):
        with pytest.raises(StaleClaim, match="attempt 1"):
            say()
    now = queue.get(job.id)
    assert (now.state, now.progress.share, now.crashes, now.error) == ("running", 0.0, 0, None)
    queue.publish(new, RESULT)
    assert list_publications(queue) == {job.id: 2}


def test_messages_of_another_owner_are_refused(queue: Queue) -> None:
    queue.submit(SPEC)
    claim = claim_job(queue, "me")
    stranger = Claim(id=claim.id, attempt=claim.attempt, owner="stranger", spec=SPEC)
    with pytest.raises(StaleClaim):
        queue.publish(stranger, RESULT)


def test_finished_job_cannot_be_changed(queue: Queue) -> None:
    job = queue.submit(SPEC)
    claim = claim_job(queue)
    queue.publish(claim, RESULT)
    before = queue.get(job.id)
    for say in (lambda: queue.publish(claim, RESULT), lambda: queue.end_failed(claim, "no"), lambda: queue.release(claim)):
        with pytest.raises(StaleClaim):
            say()
    for do in (queue.cancel, queue.retry):
        with pytest.raises(WrongJobState, match="is done"):
            do(job.id)
    assert queue.get(job.id) == before


def test_publishing_is_atomic(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second statement of the transaction fails, the first one must be undone."""
    job = queue.submit(SPEC)
    claim = claim_job(queue)
    with queue.store.open_transaction() as db:
        db.execute("INSERT INTO publications VALUES (?, 7, 'before')", (job.id,))
    with pytest.raises(Exception, match="UNIQUE"):
        queue.publish(claim, RESULT)
    assert queue.get(job.id).state == "running"


def test_third_crash_sets_a_job_aside(queue: Queue) -> None:
    job = queue.submit(SPEC)
    assert queue.end_crashed(claim_job(queue), "one") == "queued"
    assert queue.end_crashed(claim_job(queue), "two") == "queued"
    assert queue.end_crashed(claim_job(queue), "killed by SIGSEGV") == "set_aside"
    aside = queue.get(job.id)
    assert (aside.attempts, aside.crashes) == (3, 3)
    assert "3 times" in aside.error
    assert "SIGSEGV" in aside.error
    assert queue.claim("me") is None
    again = queue.retry(job.id)
    assert (again.state, again.crashes, again.error, again.ended) == ("queued", 0, None, None)
    assert claim_job(queue).attempt == 4


def test_killed_service_does_not_count_as_a_crash(queue: Queue) -> None:
    job = queue.submit(SPEC)
    for time_ in range(5):
        claim_job(queue, f"service {time_}")
        assert queue.recover(f"service {time_ + 1}") == 1
    now = queue.get(job.id)
    assert (now.state, now.attempts, now.crashes) == ("queued", 5, 0)


def test_recovery_keeps_jobs_of_the_living_owner(queue: Queue) -> None:
    queue.submit(SPEC)
    claim = claim_job(queue, "me")
    assert queue.recover("me") == 0
    queue.publish(claim, RESULT)


def test_cancelling_ends_queued_jobs_and_marks_running_ones(queue: Queue) -> None:
    waiting, running = queue.submit(SPEC.model_copy(update={"priority": -1})), queue.submit(SPEC)
    claim = claim_job(queue)
    assert queue.cancel(waiting.id).state == "cancelled"
    assert queue.claim("me") is None
    assert queue.list_cancelled([claim]) == set()
    assert queue.cancel(running.id).state == "running"
    assert queue.list_cancelled([claim]) == {running.id}
    queue.end_cancelled(claim, RESULT)
    ended = queue.get(running.id)
    assert (ended.state, ended.result) == ("cancelled", RESULT)
    assert list_publications(queue) == {}


@pytest.mark.parametrize("death", ["of the service", "of the worker", "ordered"])
def test_cancelled_job_does_not_run_again_after_a_crash(queue: Queue, death: str) -> None:
    job = queue.submit(SPEC)
    claim = claim_job(queue)
    queue.cancel(job.id)
    match death:
        case "of the service":
            queue.recover("new")
        case "of the worker":
            assert queue.end_crashed(claim, "died") == "cancelled"
        case _:
            queue.release(claim)
    assert queue.get(job.id).state == "cancelled"
    assert queue.claim("new") is None
    queue.retry(job.id)
    assert queue.list_cancelled([claim_job(queue, "new")]) == set()


def test_jobs_are_listed_from_new_to_old_in_pages(queue: Queue) -> None:
    ids = [queue.submit(SPEC.model_copy(update={"recording": name})).id for name in ("a", "b", "a", "b", "a")]
    assert [job.id for job in queue.list()] == ids[::-1]
    assert [job.id for job in queue.list(limit=2)] == ids[:2:-1]
    assert [job.id for job in queue.list(limit=2, after=ids[3])] == [ids[2], ids[1]]
    assert [job.id for job in queue.list(recording="b")] == [ids[3], ids[1]]
    claim_job(queue)
    assert [job.id for job in queue.list(state="running")] == [ids[0]]
    assert queue.count_states() == {**dict.fromkeys(JOB_STATES, 0), "queued": 4, "running": 1}
    for ask in (lambda: queue.get("none"), lambda: queue.list(after="none"), lambda: queue.cancel("none")):
        with pytest.raises(UnknownJob, match="no job 'none'"):
            ask()


def test_changes_list_each_job_once_in_its_last_state(queue: Queue) -> None:
    first, second = queue.submit(SPEC), queue.submit(SPEC)
    version, jobs = queue.list_changes(0)
    assert [job.id for job in jobs] == [first.id, second.id]
    assert version == queue.get_version()
    assert queue.list_changes(version) == (version, [])
    claim = claim_job(queue)
    queue.save_progress(claim, JobProgress(share=0.5))
    later, jobs = queue.list_changes(version)
    assert [(job.id, job.state, job.progress.share) for job in jobs] == [(first.id, "running", 0.5)]
    assert later > version
    for act in (lambda: queue.cancel(second.id), lambda: queue.end_crashed(claim, "x"), lambda: queue.cancel(first.id)):
        act()
        earlier, (later, jobs) = later, queue.list_changes(later)
        assert later > earlier
        assert len(jobs) == 1


def test_a_long_error_keeps_its_first_line_and_its_end(queue: Queue) -> None:
    job = queue.submit(SPEC)
    queue.end_failed(claim_job(queue), "the reason\n" + "x" * 100_000 + "\nthe end")
    error = queue.get(job.id).error
    assert error.startswith("the reason\n")
    assert error.endswith("the end")
    assert len(error) <= 20_000


def test_queue_is_persistent_private_and_versioned(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "q.sqlite")
    job = queue.submit(SPEC)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    queue.close()
    again = Queue(tmp_path / "q.sqlite")
    assert again.get(job.id) == job
    with again.store.open_transaction() as db:
        db.execute("PRAGMA user_version = 99")
    again.close()
    with pytest.raises(ValueError, match="version 99"):
        Queue(tmp_path / "q.sqlite")


PHOTOS, DIGITS = RecordingIdentity("photos", "a"), RecordingIdentity("digits", "a")


def test_rule_takes_a_round_once_also_after_a_restart(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "q.sqlite", Limits(max_queued=2))
    ledger = RuleHistory(queue)
    job = ledger.take("live", PHOTOS, [TakenRound(3, 1)], SPEC)
    assert job.origin == "rule live"
    assert ledger.take("live", PHOTOS, [TakenRound(4, 1)], None) is None
    queue.close()
    queue = Queue(tmp_path / "q.sqlite", Limits(max_queued=2))
    ledger = RuleHistory(queue)
    assert ledger.take("live", PHOTOS, [TakenRound(3, 1), TakenRound(4, 1)], SPEC) is None
    assert ledger.list_taken("live", PHOTOS) == {TakenRound(3, 1), TakenRound(4, 1)}
    assert ledger.take("other", PHOTOS, [TakenRound(3, 1)], SPEC) is not None
    with pytest.raises(TooManyJobs):
        ledger.take("live", PHOTOS, [TakenRound(5, 1)], SPEC)
    assert ledger.list_taken("live", PHOTOS) == {TakenRound(3, 1), TakenRound(4, 1)}, "a job that was refused has taken no round"
    assert queue.count_states()["queued"] == 2
    queue.close()


def test_ledger_sums_the_cost_of_a_rule(queue: Queue) -> None:
    ledger = RuleHistory(queue)
    for round in (1, 2, 3):
        ledger.take("live", PHOTOS, [TakenRound(round, 1)], SPEC)
    queue.submit(SPEC)
    before = queue.get(queue.list()[-1].id).created
    queue.end_crashed(claim_job(queue), "x", cpu=2.0)
    queue.publish(claim_job(queue), RESULT, cpu=3.0)
    queue.end_failed(claim_job(queue), "x", cpu=4.0)
    assert ledger.sum_cpu_seconds("live", PHOTOS) == pytest.approx(9.0)
    assert ledger.sum_cpu_seconds("live", DIGITS) == 0
    assert ledger.count_unfinished("live", PHOTOS) == 1
    assert ledger.count_submitted("live", before) == 3
    assert ledger.count_submitted("live", "9999") == 0


CLAIMS = """
import sys, time
from pathlib import Path
from attacker.service.jobs.job import Result
from attacker.service.jobs.queue import Queue
queue = Queue(Path(sys.argv[1]))
left = int(sys.argv[3])
while (claim := queue.claim(sys.argv[2])) is not None:
    queue.publish(claim, Result())
    print(claim.id, flush=True)
    left -= 1
    if not left:
        time.sleep(600)
"""


def start_worker(path: Path, owner: str, most: int = 1000) -> subprocess.Popen[str]:
    """Start a process that does jobs, and that waits to be killed after `most` of them."""
    return subprocess.Popen([sys.executable, "-c", CLAIMS, str(path), owner, str(most)], stdout=subprocess.PIPE, text=True)


def test_several_processes_do_each_job_once(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    queue = Queue(path)
    ids = {queue.submit(SPEC).id for _ in range(120)}
    processes = [start_worker(path, f"owner {i}") for i in range(3)]
    claimed = [id for process in processes for id in process.communicate(timeout=60)[0].split()]
    assert Counter(claimed) == Counter(ids)
    assert set(list_publications(queue)) == ids
    queue.close()


def test_jobs_are_published_once_in_spite_of_killed_processes(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    queue = Queue(path)
    ids = {queue.submit(SPEC).id for _ in range(40)}
    kills = 0
    while queue.count_states()["queued"]:
        process = start_worker(path, f"owner {kills}", most=15)
        process.stdout.readline()  # it has claimed a job
        time.sleep(0.003 * (kills % 7))
        process.kill()
        process.communicate()
        kills += 1
        queue.recover("nobody")
    assert kills > 1
    assert queue.count_states() == {**dict.fromkeys(JOB_STATES, 0), "done": 40}
    assert set(list_publications(queue)) == ids
    assert all(job.crashes == 0 for job in queue.list(limit=1000))
    queue.close()


def test_threads_of_one_process_share_a_queue(queue: Queue) -> None:
    claimed: list[str] = []

    def work() -> None:
        for _ in range(5):
            queue.submit(SPEC)
        while (claim := queue.claim("me")) is not None:
            queue.publish(claim, RESULT)
            claimed.append(claim.id)
            queue.list(), queue.list_changes(0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == len(set(claimed)) == 20
    assert set(list_publications(queue)) == set(claimed)


@pytest.mark.parametrize("damage", [b"junk" * 2048, None])
def test_a_damaged_file_is_refused_with_what_to_do(damage: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    queue = Queue(path, Limits())
    queue.submit(SPEC)
    queue.close()
    content = path.read_bytes()
    path.write_bytes(damage or content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(ValueError, match=r"queue\.sqlite is damaged .*; delete it together with its files -wal and -shm"):
        Queue(path, Limits())
