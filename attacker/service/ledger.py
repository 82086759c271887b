"""What rules have done so far: which rounds they took, and what that has cost."""

from collections.abc import Iterable

from attacker.service.jobs import Job, JobSpec
from attacker.service.queue import Queue
from attacker.service.rows import now


class Ledger:
    """Of the rules of one queue, in its file."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self._store = queue, queue.store

    def take(self, rule: str, recording: str, rounds: Iterable[int], spec: JobSpec | None) -> Job | None:
        """Submit one job for rounds of a recording, in the name of a rule, unless each of them was taken before.

        spec: None notes that the rule leaves these rounds out. Returns None where nothing was submitted. Raises Full as `submit`.
        """
        with self._store.writing() as db:
            known = {row[0] for row in db.execute("SELECT round FROM taken WHERE rule = ? AND recording = ?", (rule, recording))}
            new = [round for round in rounds if round not in known]
            if not new:
                return None
            job = None if spec is None else self._queue.added(db, spec, f"rule {rule}")
            db.executemany(
                "INSERT INTO taken VALUES (?, ?, ?, ?, ?)",
                [(rule, recording, round, None if job is None else job.id, now()) for round in new],
            )
            return job

    def taken(self, rule: str, recording: str) -> set[int]:
        """Rounds that a rule has submitted a job for, or left out."""
        query = "SELECT round FROM taken WHERE rule = ? AND recording = ?"
        return {row[0] for row in self._store.read(query, rule, recording)}

    def waiting(self, rule: str, recording: str) -> list[tuple[int, str]]:
        """Rounds whose jobs wait, from the oldest, and the jobs."""
        query = (
            "SELECT round, job FROM taken JOIN jobs ON job = id "
            "WHERE rule = ? AND taken.recording = ? AND state = 'queued' ORDER BY round"
        )
        return [(row[0], row[1]) for row in self._store.read(query, rule, recording)]

    def unfinished(self, rule: str, recording: str) -> int:
        """Jobs of a rule that wait or run, of one recording."""
        query = "SELECT count(*) FROM jobs WHERE origin = ? AND recording = ? AND state IN ('queued', 'running')"
        return int(self._store.read(query, f"rule {rule}", recording)[0][0])

    def submitted_since(self, rule: str, instant: str) -> int:
        """Jobs of a rule since an instant, in ISO 8601 as jobs have it."""
        return int(self._store.read("SELECT count(*) FROM jobs WHERE origin = ? AND created >= ?", f"rule {rule}", instant)[0][0])

    def cpu_seconds(self, rule: str, recording: str) -> float:
        """What the jobs of a rule have taken on one recording so far."""
        query = "SELECT coalesce(sum(cpu), 0) FROM jobs WHERE origin = ? AND recording = ?"
        return float(self._store.read(query, f"rule {rule}", recording)[0][0])
