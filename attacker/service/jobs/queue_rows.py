"""Rows of the table of jobs: conversion to `Job`, and changes within a transaction."""

import json
import sqlite3
from dataclasses import dataclass
from datetime import UTC, datetime

from attacker.service.jobs.job import AuditSpec, Job, JobProgress, JobSpec, JobState, Result, read_stored_spec

MAX_ERROR = 20_000
"""Largest length of a stored error in characters; of a longer error, the first line and the end are kept."""


class UnknownJob(KeyError):
    """Raised if there is no job with a given id."""

    def __str__(self) -> str:
        return str(self.args[0])


class StaleClaim(RuntimeError):
    """Raised if a claim is no longer valid: its job has left the state "running", or another attempt has claimed it."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The right to run one attempt of a job and to store how it ends. The claim ends when the job leaves the state "running".

    attempt: number of this attempt at the job, from 1. owner: random id of the start of the service that runs it.
    """

    id: str
    attempt: int
    owner: str
    spec: JobSpec | AuditSpec


def check(db: sqlite3.Connection, claim: Claim) -> sqlite3.Row:
    """Return the row of a claimed job. Raises StaleClaim if the claim is no longer valid."""
    query = "SELECT * FROM jobs WHERE id = ? AND attempts = ? AND owner = ? AND state = 'running'"
    row: sqlite3.Row | None = db.execute(query, (claim.id, claim.attempt, claim.owner)).fetchone()
    if row is None:
        raise StaleClaim(
            f"the results of attempt {claim.attempt} of job {claim.id} are dropped, since it has ended or a newer one has begun"
        )
    return row


def end_job(
    db: sqlite3.Connection,
    claim: Claim,
    state: JobState,
    *,
    cpu: float,
    error: str | None = None,
    result: Result | None = None,
    share: float | None = None,
) -> None:
    """Write the final state of a claimed job. Raises StaleClaim if the claim is no longer valid.

    cpu: CPU seconds of this attempt, added to the CPU seconds of earlier attempts. error, result: replace the stored error and
    result, also if None.
    share: share of the work that is done, from 0 to 1; None keeps the stored one.
    """
    check(db, claim)
    db.execute(
        "UPDATE jobs SET state = ?, ended = ?, owner = NULL, error = ?, result = ?, share = coalesce(?, share), cpu = cpu + ?, "
        "version = ? WHERE id = ?",
        (
            state,
            format_now(),
            None if error is None else _shorten(error),
            None if result is None else result.model_dump_json(),
            share,
            cpu,
            count_change(db),
            claim.id,
        ),
    )


def wait_again(db: sqlite3.Connection, id: str, *, cancelled: bool = False, cpu: float = 0.0) -> None:
    """Put a job back into the queue, or mark it as cancelled if `cancelled` is True, whatever its present state.

    cpu: CPU seconds of the attempt that ends, added to the CPU seconds of earlier attempts.
    """
    state, ended = ("cancelled", format_now()) if cancelled else ("queued", None)
    db.execute(
        "UPDATE jobs SET state = ?, ended = ?, owner = NULL, cpu = cpu + ?, version = ? WHERE id = ?",
        (state, ended, cpu, count_change(db), id),
    )


def count_change(db: sqlite3.Connection) -> int:
    """Increase the counter of changes in the database by 1, and return its new value."""
    (version,) = db.execute("UPDATE changes SET version = version + 1 RETURNING version").fetchone()
    return int(version)


def get_job(db: sqlite3.Connection, id: str) -> Job:
    """Return the job with the id `id`. Raises UnknownJob."""
    row = db.execute("SELECT * FROM jobs WHERE id = ?", (id,)).fetchone()
    if row is None:
        raise UnknownJob(f"there is no job {id!r}")
    return make_job(row)


def make_job(row: sqlite3.Row) -> Job:
    return Job(
        id=row["id"],
        spec=read_stored_spec(json.loads(row["spec"])),
        state=row["state"],
        attempts=row["attempts"],
        crashes=row["crashes"],
        origin=row["origin"],
        version=row["version"],
        created=row["created"],
        started=row["started"],
        ended=row["ended"],
        progress=JobProgress(share=row["share"], words=row["words"]),
        error=row["error"],
        result=None if row["result"] is None else Result.model_validate_json(row["result"]),
    )


def _shorten(error: str) -> str:
    return error if len(error) <= MAX_ERROR else f"{error[:500]}\n...\n{error[-MAX_ERROR + 600 :]}"


def format_now() -> str:
    """Return the present time in ISO 8601 and UTC, with milliseconds. Sorted as text, times are in chronological order."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
