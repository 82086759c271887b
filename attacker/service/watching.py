"""Looks at the folders and at the queue, again and again, and tells what changed."""

import logging
import threading
from collections.abc import Callable, Sequence

from attacker.service.catalogue import Arrived, Catalogue
from attacker.service.events import Feed
from attacker.service.jobs import Job
from attacker.service.queue import Queue

JOBS_EVERY = 0.25
"""Seconds between two looks at the queue."""

log = logging.getLogger("attacker.service")


class Watcher:
    """Two threads. arrived: is told of the rounds that are new after each look; changed: of each job that did."""

    def __init__(
        self,
        catalogue: Catalogue,
        queue: Queue,
        feed: Feed,
        *,
        every: float,
        arrived: Callable[[Sequence[Arrived]], None],
        changed: Callable[[Job], None],
    ) -> None:
        self.catalogue, self.queue, self.feed = catalogue, queue, feed
        self._every, self._arrived, self._changed = every, arrived, changed
        self._version = queue.version()
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._again, args=(look, every), name=f"watcher of {what}", daemon=True)
            for look, every, what in ((self.look, every, "folders"), (self.look_at_jobs, JOBS_EVERY, "jobs"))
        ]

    def start(self) -> None:
        """Returns after the first look at the folders."""
        self.look()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Returns when both threads have ended."""
        self._end.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(5)

    def look(self) -> None:
        """Once at the folders."""
        changes = self.catalogue.look()
        for run in changes.changed:
            self.feed.publish("recording", run.id, run.told)
        for id in changes.removed:
            self.feed.publish("removed", id, {"id": id})
        self._arrived(changes.arrived)

    def look_at_jobs(self) -> None:
        """Once at the queue."""
        if self.queue.version() == self._version:
            return
        self._version, jobs = self.queue.changes(self._version)
        for job in jobs:
            self._changed(job)
            self.feed.publish("job", job.id, job.model_dump(mode="json"))

    def _again(self, look: Callable[[], None], every: float) -> None:
        while not self._end.wait(every):
            try:
                look()
            except Exception:  # of whatever kind: the next look may well succeed, and nobody else would
                log.exception("a look failed, and is made again")
