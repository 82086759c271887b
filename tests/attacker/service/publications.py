"""Reader of the publications in the database of a queue: which attempt finished each job."""

from attacker.service.jobs.queue import Queue


def list_publications(queue: Queue) -> dict[str, int]:
    """Return a dict from the id of each job that is done to the number, from 1, of the attempt that did it."""
    return {row[0]: row[1] for row in queue.store.read("SELECT job, attempt FROM publications")}
