"""Watcher of folders and queue: looks for changes at regular intervals, and publishes them as events to open web pages."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from attacker.service.events import Feed
from attacker.service.index import ArrivedRound, Catalogue, Changes
from attacker.service.jobs.job import Job
from attacker.service.jobs.queue import Queue

QUEUE_POLL_SECONDS = 0.25
"""Seconds between two regular polls of the queue, which another process may have changed."""
INDEX_POLL_SECONDS = 0.05
"""Seconds between two polls of the indices of runs that are being recorded, one file each."""

log = logging.getLogger("attacker.service")


class Watcher:
    """Two threads that look for changes, one in the folders of recordings, one in the queue of jobs, and publish them in `feed`.

    every: seconds between two scans of all folders. arrived: callback with the rounds that were found since its last call; the
    list may be empty. changed: callback with each job that has changed.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        queue: Queue,
        feed: Feed,
        *,
        every: float,
        arrived: Callable[[Sequence[ArrivedRound]], None],
        changed: Callable[[Job], None],
    ) -> None:
        self.catalogue, self.queue, self.feed = catalogue, queue, feed
        self._every, self._arrived, self._changed = every, arrived, changed
        self._version = queue.get_version()
        self._telling = threading.Lock()
        self._new: list[ArrivedRound] = []
        self._end, self._called = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"watcher of {what}", daemon=True)
            for work, what in ((self._watch_folders, "folders"), (self._watch_jobs, "jobs"))
        ]

    def start(self) -> None:
        """Scan the folders once, then start both threads."""
        self.scan()
        self.queue.add_listener(self._called.set)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop both threads, and wait until they have finished, for at most 5 s each."""
        self._end.set()
        self._called.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(5)

    def scan(self) -> None:
        """Scan all folders once, publish changed and removed recordings, and pass new rounds to the callback `arrived`."""
        self._tell(self.catalogue.scan)
        self._hand_on()

    def scan_run(self, recording: str) -> None:
        """Scan one recording and publish it if it has changed. Later requests get this state; a thread passes on new rounds."""
        self._tell(lambda: self.catalogue.scan_run(recording))

    def scan_jobs(self) -> None:
        """Pass each job that has changed since the last call to the callback `changed`, and publish it, in its present state."""
        if self.queue.get_version() == self._version:
            return
        self._version, jobs = self.queue.list_changes(self._version)
        for job in jobs:
            self._changed(job)
            self.feed.publish("job", job.id, job.model_dump(mode="json"))

    def _tell(self, look: Callable[[], Changes]) -> None:
        """Call `look`, publish the changed and removed recordings that it returns, and keep the new rounds for `_hand_on`.

        This happens under a lock, so that events of a recording are in chronological order.
        """
        with self._telling:
            changes = look()
            for run in changes.changed:
                self.feed.publish("recording", run.id, run.summary)
            for id in changes.removed:
                self.feed.publish("removed", id, {"id": id})
            self._new += changes.arrived

    def _hand_on(self) -> None:
        """Pass the new rounds of all scans since the last call to the callback `arrived`."""
        with self._telling:
            new, self._new = self._new, []
        self._arrived(new)

    def _scan_active(self) -> None:
        """Scan recordings whose index has changed within the last minute, and pass new rounds to the callback `arrived`."""
        for id in self.catalogue.list_changed():
            self.scan_run(id)
        if self._new:
            self._hand_on()

    def _watch_folders(self) -> None:
        due = time.monotonic() + self._every
        while not self._end.wait(min(INDEX_POLL_SECONDS, self._every)):
            if time.monotonic() >= due:
                self._repeat_scan(self.scan)
                due = time.monotonic() + self._every
            else:
                self._repeat_scan(self._scan_active)

    def _watch_jobs(self) -> None:
        while not self._end.is_set():
            self._called.wait(QUEUE_POLL_SECONDS)
            self._called.clear()
            self._repeat_scan(self.scan_jobs)

    def _repeat_scan(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception:  # any error: the next scan may succeed, and no other thread would do it
            log.exception("a scan failed and will be repeated")
            self._end.wait(1.0)
