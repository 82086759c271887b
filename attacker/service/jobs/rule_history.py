"""History of rules that submit jobs for new rounds: the rounds that a rule has dealt with, and the CPU time of its jobs."""

from collections.abc import Iterable
from typing import NamedTuple

from attacker.service.jobs.job import Job, JobSpec
from attacker.service.jobs.queue import Queue
from attacker.service.jobs.queue_rows import format_now

JOBS_OF_RULE = "SELECT job FROM taken WHERE rule = ? AND recording = ? AND identity = ?"
"""The jobs of a rule on one recording."""


class RecordingIdentity(NamedTuple):
    """One recording. identity: digest of its manifest, which differs for an earlier recording with the same id."""

    id: str
    identity: str


class TakenRound(NamedTuple):
    """A round of a recording that a rule has dealt with. A rule deals with it again if a later attempt records the round again.

    attempt: how often the federation had been started when the round was recorded; above 1 after a resume.
    """

    round: int
    attempt: int


class RuleHistory:
    """The history of the rules that submit jobs to one queue, stored in the queue's SQLite file.

    It tells which rounds of each recording a rule has dealt with, and which jobs it submitted for them.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue, self._store = queue, queue.store

    def take(self, rule: str, recording: RecordingIdentity, rounds: Iterable[TakenRound], spec: JobSpec | None) -> Job | None:
        """Submit one job of a rule, store that the rule has dealt with `rounds` of a recording, and return the job.

        If the rule has dealt with all of `rounds` before, nothing is submitted or stored. Otherwise only the rounds among them
        that are new to the rule are stored.
        spec: request for the job, whose field `spec.rounds` selects the rounds that it attacks; for an attack that combines
        rounds, `spec.rounds` holds more rounds than `rounds`. None submits no job, and stores `rounds` as left out.
        Returns None if no job was submitted. Raises TooManyJobs if too many jobs wait in the queue.
        """
        with self._store.open_transaction() as db:
            query = "SELECT round, attempt FROM taken WHERE rule = ? AND recording = ? AND identity = ?"
            known = {TakenRound(*row) for row in db.execute(query, (rule, *recording))}
            new = [taken for taken in rounds if taken not in known]
            if not new:
                return None
            job = None if spec is None else self._queue.add_job(db, spec, f"rule {rule}")
            db.executemany(
                "INSERT INTO taken VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(rule, *recording, *taken, None if job is None else job.id, format_now()) for taken in new],
            )
            return job

    def list_taken(self, rule: str, recording: RecordingIdentity) -> set[TakenRound]:
        """Return the rounds, each with its attempt, for which a rule has submitted a job or decided to submit none."""
        query = "SELECT round, attempt FROM taken WHERE rule = ? AND recording = ? AND identity = ?"
        return {TakenRound(*row) for row in self._store.read(query, rule, *recording)}

    def list_waiting(self, rule: str, recording: RecordingIdentity) -> list[tuple[int, str]]:
        """Return a pair (round, job id) for each waiting job of a rule on a recording, in ascending order of rounds."""
        query = (
            "SELECT round, job FROM taken JOIN jobs ON job = id "
            "WHERE rule = ? AND taken.recording = ? AND identity = ? AND state = 'queued' ORDER BY round, attempt"
        )
        return [(row[0], row[1]) for row in self._store.read(query, rule, *recording)]

    def count_unfinished(self, rule: str, recording: RecordingIdentity) -> int:
        """Return the number of jobs of a rule on a recording that wait or run."""
        query = f"SELECT count(*) FROM jobs WHERE id IN ({JOBS_OF_RULE}) AND state IN ('queued', 'running')"
        return int(self._store.read(query, rule, *recording)[0][0])

    def count_submitted(self, rule: str, instant: str) -> int:
        """Return how many jobs a rule has submitted, over all recordings, since `instant` (as `format_now`)."""
        return int(self._store.read("SELECT count(*) FROM jobs WHERE origin = ? AND created >= ?", f"rule {rule}", instant)[0][0])

    def sum_cpu_seconds(self, rule: str, recording: RecordingIdentity) -> float:
        """Return the CPU seconds of a rule's jobs on one recording. A running attempt is added when it ends."""
        query = f"SELECT coalesce(sum(cpu), 0) FROM jobs WHERE id IN ({JOBS_OF_RULE})"
        return float(self._store.read(query, rule, *recording)[0][0])
