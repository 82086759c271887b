"""Durable queue of the service's jobs in a SQLite file: jobs outlast the death of the service and of its workers.

A claim is the right to run one attempt of a job. Results are stored only for a claim that is still valid.
"""

import builtins
import json
import secrets
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from attacker.service.jobs.job import (
    FINAL_STATES,
    JOB_STATES,
    AuditSpec,
    Job,
    JobProgress,
    JobSpec,
    JobState,
    Result,
    read_stored_spec,
)
from attacker.service.jobs.queue_rows import (
    Claim,
    UnknownJob,
    check,
    count_change,
    end_job,
    format_now,
    get_job,
    make_job,
    wait_again,
)
from attacker.service.jobs.store import Store


class TooManyJobs(RuntimeError):
    """Raised if a job cannot be added because the maximum number of waiting jobs, `Limits.max_queued`, is reached."""


class WrongJobState(ValueError):
    """Raised if a job cannot be cancelled or repeated in its present state."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a queue.

    max_queued: maximum number of waiting jobs.
    crashes:    number of deaths of a job's workers at which the job is set aside: it then runs again only if a user requests it.
    """

    max_queued: int = 1000
    crashes: int = 3


class Queue:
    """The jobs in one SQLite file, for several threads and processes. Each change is on disk when the method returns."""

    def __init__(self, path: Path, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.store = Store(path)

    def close(self) -> None:
        self.store.close()

    def add_listener(self, listener: Callable[[], object]) -> None:
        """Register a callback that is called after each write to the file by this process, see `Store.add_listener`."""
        self.store.add_listener(listener)

    # --- queries ---

    def get(self, id: str) -> Job:
        """Return the job with the id `id`. Raises UnknownJob."""
        rows = self.store.read("SELECT * FROM jobs WHERE id = ?", id)
        if not rows:
            raise UnknownJob(f"there is no job {id!r}")
        return make_job(rows[0])

    def list(
        self, state: JobState | None = None, recording: str | None = None, limit: int = 100, after: str | None = None
    ) -> builtins.list[Job]:
        """Return at most `limit` jobs, the last submitted first.

        state, recording: only jobs in this state, or on the recording with this id; None for all.
        after: id of the last job of the previous page. Raises UnknownJob if it does not exist.
        """
        parts, values = [], list[str | int]()
        for column, value in (("state", state), ("recording", recording)):
            if value is not None:
                parts.append(f"{column} = ?")
                values.append(value)
        if after is not None:
            parts.append("number < ?")
            values.append(self._get_number(after))
        where = f"WHERE {' AND '.join(parts)}" if parts else ""
        rows = self.store.read(f"SELECT * FROM jobs {where} ORDER BY number DESC LIMIT ?", *values, limit)
        return [make_job(row) for row in rows]

    def _get_number(self, id: str) -> int:
        rows = self.store.read("SELECT number FROM jobs WHERE id = ?", id)
        if not rows:
            raise UnknownJob(f"there is no job {id!r}")
        return int(rows[0][0])

    def count_states(self) -> dict[str, int]:
        """Return a dict from each of `JOB_STATES` to the number of jobs in this state."""
        counts = {row[0]: row[1] for row in self.store.read("SELECT state, count(*) FROM jobs GROUP BY state")}
        return {state: counts.get(state, 0) for state in JOB_STATES}

    def get_version(self) -> int:
        """Return the value of a counter that increases with every change of a job."""
        return int(self.store.read("SELECT version FROM changes")[0][0])

    def list_changes(self, after: int) -> tuple[int, builtins.list[Job]]:
        """Return a pair (version, jobs): the jobs that changed after version `after`, in the order of their last change.

        The returned version is the one to pass as `after` next time: the version of the last change, or `after` without a change.
        """
        rows = self.store.read("SELECT * FROM jobs WHERE version > ? ORDER BY version", after)
        return (rows[-1]["version"] if rows else after), [make_job(row) for row in rows]

    # --- actions of users ---

    def submit(self, spec: JobSpec | AuditSpec, origin: str = "request") -> Job:
        """Add a job to the queue, and return it.

        origin: what asked for it, `request` or `rule NAME`. Raises TooManyJobs if `Limits.max_queued` jobs wait already.
        """
        with self.store.open_transaction() as db:
            return self.add_job(db, spec, origin)

    def add_job(self, db: sqlite3.Connection, spec: JobSpec | AuditSpec, origin: str) -> Job:
        """Add a job as `submit` does, but within the open transaction `db`, and return it. Raises TooManyJobs."""
        self._check_room(db)
        id = secrets.token_hex(8)
        values = (id, spec.recording, spec.model_dump_json(), spec.priority, origin, format_now(), count_change(db))
        db.execute(
            "INSERT INTO jobs (id, recording, spec, priority, origin, created, version, state) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, 'queued')",
            values,
        )
        return get_job(db, id)

    def _check_room(self, db: sqlite3.Connection) -> None:
        (waiting,) = db.execute("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()
        if waiting >= self.limits.max_queued:
            raise TooManyJobs(f"{waiting} jobs wait, and the limit is {self.limits.max_queued}; try again later")

    def cancel(self, id: str) -> Job:
        """Cancel a waiting job, or request the cancellation of a running one, and return the job.

        A running job becomes cancelled once its worker has stopped. The worker first saves its best reconstructions so far, for
        which it has a limited time. If it completes the job before it stops, the job ends as done.
        Raises UnknownJob, and WrongJobState if the job is in a final state.
        """
        with self.store.open_transaction() as db:
            job = get_job(db, id)
            if job.state in FINAL_STATES:
                raise WrongJobState(f"job {id} is {job.state}; only waiting and running jobs can be cancelled")
            if job.state == "queued":
                wait_again(db, id, cancelled=True)
            else:
                db.execute("UPDATE jobs SET asked_to_end = 1, version = ? WHERE id = ?", (count_change(db), id))
            return get_job(db, id)

    def leave_out(self, id: str, reason: str) -> bool:
        """Cancel a job if it waits, with `reason` as its error, and return whether it waited. Raises UnknownJob."""
        with self.store.open_transaction() as db:
            waits = get_job(db, id).state == "queued"
            if waits:
                wait_again(db, id, cancelled=True)
                db.execute("UPDATE jobs SET error = ? WHERE id = ?", (reason, id))
            return waits

    def retry(self, id: str) -> Job:
        """Put a job that failed, was cancelled or was set aside back into the queue, and return it.

        Its number of crashes becomes 0, and its progress, error and result are deleted. The job continues from the files of its
        earlier attempts. Raises UnknownJob, WrongJobState if the job is in another state, and TooManyJobs if `Limits.max_queued`
        jobs wait already.
        """
        with self.store.open_transaction() as db:
            job = get_job(db, id)
            if job.state not in ("failed", "cancelled", "set_aside"):
                raise WrongJobState(f"job {id} is {job.state}; only jobs in state failed, cancelled or set_aside can be repeated")
            self._check_room(db)
            db.execute(
                "UPDATE jobs SET state = 'queued', crashes = 0, share = 0, words = '', error = NULL, result = NULL, "
                "ended = NULL, asked_to_end = 0, version = ? WHERE id = ?",
                (count_change(db), id),
            )
            return get_job(db, id)

    # --- actions of the supervisor ---

    def recover(self, owner: str) -> int:
        """Put jobs that earlier starts of the service left running back into the queue; this does not count as a crash.

        Jobs whose cancellation was requested are marked as cancelled instead. Returns the number of all jobs that were left
        running.
        owner: random id of the present start of the service. To be called only while no other service works on this queue.
        """
        with self.store.open_transaction() as db:
            rows = db.execute("SELECT id, asked_to_end FROM jobs WHERE state = 'running' AND owner != ?", (owner,)).fetchall()
            for row in rows:
                wait_again(db, row["id"], cancelled=bool(row["asked_to_end"]))
            return len(rows)

    def claim(self, owner: str) -> Claim | None:
        """Mark the next waiting job as running, and return the claim on it, the right to run this attempt; None if no job waits.

        The next job is the waiting job with the highest priority; among jobs of equal priority, the one submitted first.
        owner: as in `recover`.
        """
        # called often, so an empty queue must not cost a write
        if not self.store.read("SELECT 1 FROM jobs WHERE state = 'queued' LIMIT 1"):
            return None
        with self.store.open_transaction() as db:
            row = db.execute("SELECT * FROM jobs WHERE state = 'queued' ORDER BY priority DESC, number LIMIT 1").fetchone()
            if row is None:
                return None
            attempt = row["attempts"] + 1
            db.execute(
                "UPDATE jobs SET state = 'running', owner = ?, attempts = ?, started = ?, version = ? WHERE id = ?",
                (owner, attempt, format_now(), count_change(db), row["id"]),
            )
            return Claim(id=row["id"], attempt=attempt, owner=owner, spec=read_stored_spec(json.loads(row["spec"])))

    def save_progress(self, claim: Claim, progress: JobProgress) -> None:
        """Store the progress of a running job. Raises StaleClaim if the claim is no longer valid."""
        with self.store.open_transaction() as db:
            check(db, claim)
            db.execute(
                "UPDATE jobs SET share = ?, words = ?, version = ? WHERE id = ?",
                (progress.share, progress.words, count_change(db), claim.id),
            )

    def list_cancelled(self, claims: Iterable[Claim]) -> set[str]:
        """Return the ids of those claimed jobs that still run, and whose cancellation was requested."""
        ids = json.dumps([claim.id for claim in claims])
        query = "SELECT id FROM jobs WHERE asked_to_end AND state = 'running' AND id IN (SELECT value FROM json_each(?))"
        return {row[0] for row in self.store.read(query, ids)}

    def publish(self, claim: Claim, result: Result, *, cpu: float = 0.0) -> None:
        """Mark a job as done, and store its result.

        cpu: CPU seconds of this attempt. Raises StaleClaim if the claim is no longer valid.
        """
        with self.store.open_transaction() as db:
            end_job(db, claim, "done", result=result, cpu=cpu, share=1.0)
            db.execute("INSERT INTO publications VALUES (?, ?, ?)", (claim.id, claim.attempt, format_now()))

    def end_failed(self, claim: Claim, error: str, result: Result | None = None, *, cpu: float = 0.0) -> None:
        """Mark a job as failed. It runs again only if a user requests it.

        error: the reason. result: what was finished before. cpu: CPU seconds of this attempt. Raises StaleClaim if the claim is
        no longer valid.
        """
        with self.store.open_transaction() as db:
            end_job(db, claim, "failed", error=error, result=result, cpu=cpu)

    def end_cancelled(self, claim: Claim, result: Result | None = None, *, cpu: float = 0.0) -> None:
        """Mark a job as cancelled, with the attempt's result and CPU seconds. Raises StaleClaim for an invalid claim."""
        with self.store.open_transaction() as db:
            end_job(db, claim, "cancelled", result=result, cpu=cpu)

    def end_crashed(self, claim: Claim, reason: str, *, cpu: float = 0.0) -> JobState:
        """Count the death of a job's worker, and return the job's new state.

        It is "cancelled" if the cancellation was requested, else "set_aside" if this was at least the `Limits.crashes`-th death,
        and else "queued": the job waits again.
        reason: how the worker died; part of the job's error, except if it waits again. cpu: CPU seconds of this attempt.
        Raises StaleClaim if the claim is no longer valid.
        """
        with self.store.open_transaction() as db:
            row = check(db, claim)
            crashes = row["crashes"] + 1
            if row["asked_to_end"]:
                end_job(db, claim, "cancelled", error=reason, cpu=cpu)
            elif crashes >= self.limits.crashes:
                times = "once" if crashes == 1 else f"{crashes} times"
                end_job(db, claim, "set_aside", error=f"its worker died {times}, at last: {reason}", cpu=cpu)
            else:
                wait_again(db, claim.id, cpu=cpu)
            db.execute("UPDATE jobs SET crashes = ? WHERE id = ?", (crashes, claim.id))
            return get_job(db, claim.id).state

    def release(self, claim: Claim, *, cpu: float = 0.0) -> None:
        """Put a running job back into the queue without counting a crash, or mark it as cancelled if this was requested.

        cpu: CPU seconds of this attempt. Raises StaleClaim if the claim is no longer valid.
        """
        with self.store.open_transaction() as db:
            row = check(db, claim)
            wait_again(db, claim.id, cancelled=bool(row["asked_to_end"]), cpu=cpu)
