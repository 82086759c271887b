"""Background threads of the service: watch the recordings, run jobs, and submit jobs by the rules of a file."""

import logging
import sqlite3
from collections.abc import Sequence

from attacker.service.http.dependencies import ServiceComponents
from attacker.service.index import ArrivedRound
from attacker.service.jobs.queue import TooManyJobs
from attacker.service.jobs.rule_history import RecordingIdentity
from attacker.service.rules import Rules
from attacker.service.settings import UNMEASURED_REASON
from attacker.service.supervisor.supervisor import Supervisor
from attacker.service.watcher import Watcher

log = logging.getLogger("attacker.service")


class BackgroundWork:
    """The background work of one service: the watcher of recordings, the supervisor of jobs, and the rules that submit jobs.

    Raises ValueError if the file of rules cannot be read or is invalid, or if a rule limits the processor time of jobs although
    they run on a Ray cluster, where it cannot be measured.
    """

    def __init__(self, components: ServiceComponents) -> None:
        settings = components.settings
        self._components = components
        self._rules = Rules(settings.rules, components.queue, settings.folder) if settings.rules else None
        limited = [rule.name for rule in self._rules.rules if rule.budget.cpu_seconds is not None] if self._rules else []
        if limited and not settings.measures:
            raise ValueError(
                f"{settings.rules}: rule {limited[0]!r}: budget.cpu_seconds cannot be applied with --ray {settings.ray}: "
                f"{UNMEASURED_REASON}; use --ray local, or remove budget.cpu_seconds"
            )
        self._behind: set[str] = set()
        self._watcher = Watcher(
            components.catalogue,
            components.queue,
            components.feed,
            every=settings.every,
            arrived=self.apply_rules,
            changed=components.metrics.count_change,
        )
        self._supervisor = Supervisor(settings, components.queue, before_end=self._watcher.scan_run)

    def start(self) -> None:
        """Start the threads, and return after the first scan for recordings.

        Raises ValueError if another service uses the same state folder, if this folder is not trusted, or if a memory limit of
        jobs is set that this machine cannot measure.
        """
        self._supervisor.start()
        self._watcher.start()

    def stop(self) -> None:
        """Stop all threads and workers, and close the queue.

        Running jobs go back into the queue, from which the next start resumes them; jobs whose cancellation was requested are
        cancelled instead.
        """
        self._watcher.stop()
        self._supervisor.stop()
        self._components.queue.close()

    def apply_rules(self, rounds: Sequence[ArrivedRound]) -> None:
        """Count the new rounds `rounds` in the metrics, and submit the jobs that the rules require for their recordings.

        Recordings whose jobs could not all be submitted at the previous call, for example because the queue was full, are tried
        again. Nothing is submitted without a file of rules.
        """
        if rounds:
            self._components.metrics.count_arrived(rounds)
        if self._rules is None:
            return
        new, self._behind = self._behind | {new_round.recording for new_round in rounds}, set()
        for run in self._components.catalogue.list_runs():
            if run.id not in new or run.manifest is None:
                continue
            try:
                self._rules.follow(RecordingIdentity(run.id, run.identity), run.index.attempts)
            except (TooManyJobs, ValueError, OSError, sqlite3.Error) as error:
                self._behind.add(run.id)
                log.warning("rules on %s were not applied to all rounds: %s", run.id, error)
