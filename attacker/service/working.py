"""What the service does beside answering: it watches, does jobs, and follows its rules."""

import logging
import sqlite3
from collections.abc import Sequence

from attacker.service.catalogue import Arrived
from attacker.service.crew import Crew
from attacker.service.parts import Parts
from attacker.service.queue import Full
from attacker.service.rules import Rules
from attacker.service.watching import Watcher

log = logging.getLogger("attacker.service")


class Works:
    """Raises ValueError where the file of rules cannot be read."""

    def __init__(self, parts: Parts) -> None:
        settings = parts.settings
        self._parts = parts
        self._rules = Rules(settings.rules, parts.queue, settings.folder) if settings.rules else None
        self._behind: set[str] = set()
        self._watcher = Watcher(
            parts.catalogue, parts.queue, parts.feed, every=settings.every, arrived=self.arrived, changed=parts.metrics.changed
        )
        self._crew = Crew(settings, parts.queue, before_end=self._watcher.look_at)

    def start(self) -> None:
        """Returns when every run that there is has been looked at. Raises ValueError where another service is at work here."""
        self._crew.start()
        self._watcher.start()

    def stop(self) -> None:
        """Jobs under way wait for the next start."""
        self._watcher.stop()
        self._crew.stop()
        self._parts.queue.close()

    def arrived(self, rounds: Sequence[Arrived]) -> None:
        """Have the rules follow new rounds, and those that the queue had no room for at an earlier look."""
        if rounds:
            self._parts.metrics.arrived(rounds)
        if self._rules is None:
            return
        new: dict[str, list[int]] = {recording: [] for recording in self._behind}
        for one in rounds:
            new.setdefault(one.recording, []).append(one.round)
        self._behind.clear()
        for recording, some in new.items():
            try:
                self._rules.arrived(recording, some)
            except (Full, ValueError, OSError, sqlite3.Error) as error:
                self._behind.add(recording)
                log.warning("rules on %s are behind: %s", recording, error)
