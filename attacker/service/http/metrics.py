"""Metrics for Prometheus: requests, jobs, and by how many rounds the attacks lag behind the recording."""

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attacker.service.http.middleware import API_PREFIX
from attacker.service.index import ArrivedRound, Catalogue, CatalogueRun
from attacker.service.jobs.job import FINAL_STATES, Job
from attacker.service.jobs.queue import Queue

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGE_SECONDS = 600.0
"""Seconds for which a recording's own gauges are reported after the recording last changed."""
MAX_RECORDINGS = 100
"""Largest number of recordings with their own gauges."""
REQUEST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
JOB_BUCKETS = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600)


class Metrics:
    """Counters and histograms of requests, jobs and rounds, and gauges of the present state, for Prometheus.

    The gauges read the queue of jobs and the catalogue of recordings when the metrics are collected.
    """

    def __init__(self, queue: Queue, catalogue: Catalogue) -> None:
        self.registry = CollectorRegistry()
        self._queue, self._catalogue = queue, catalogue
        of: dict[str, Any] = {"registry": self.registry, "namespace": "fedleak"}
        self.requests = Counter("requests", "Answered requests.", ("route", "method", "status"), **of)
        self.seconds = Histogram(
            "request_seconds", "Seconds until the response was sent.", ("route",), buckets=REQUEST_BUCKETS, **of
        )
        self.waited = Histogram("job_wait_seconds", "Seconds from submission to the first worker.", buckets=JOB_BUCKETS, **of)
        self.took = Histogram("job_seconds", "Seconds of the last attempt.", ("state",), buckets=JOB_BUCKETS, **of)
        self.arrivals = Counter("rounds_seen", "Rounds that were found in recordings.", **of)
        self.lag = Histogram("round_lag_seconds", "Seconds until a new round is found.", buckets=JOB_BUCKETS, **of)
        self._started: set[str] = set()
        self.registry.register(_StateCollector(queue, catalogue))

    def read(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)

    def count_arrived(self, rounds: Sequence[ArrivedRound]) -> None:
        """Count new rounds, and record the delay of each: seconds from its last reply until it was found (`ArrivedRound.lag`).

        All rounds are counted. A delay is not recorded if it is unknown, negative, or at least `GAUGE_SECONDS`: such a round was
        probably recorded while the service was not running.
        """
        self.arrivals.inc(len(rounds))
        for lag in (round.lag for round in rounds):
            if lag is not None and 0 <= lag < GAUGE_SECONDS:
                self.lag.observe(lag)

    def count_change(self, job: Job) -> None:
        """Record how long a job waited if it now runs for the first time, or how long its last attempt took if it has now ended.

        job: a job that has just changed.
        """
        created, started, ended = (
            None if text is None else datetime.fromisoformat(text).timestamp() for text in (job.created, job.started, job.ended)
        )
        if job.state == "running" and job.attempts == 1 and job.id not in self._started and started and created:
            self._started.add(job.id)
            self.waited.observe(max(0.0, started - created))
        if job.state in FINAL_STATES:
            self._started.discard(job.id)
            if started and ended:
                self.took.labels(job.state).observe(max(0.0, ended - started))


class _StateCollector:
    """Gauges of jobs, recordings, rounds and observations, whose values are computed at each collection."""

    def __init__(self, queue: Queue, catalogue: Catalogue) -> None:
        self._queue, self._catalogue = queue, catalogue

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges; `prometheus_client` calls this method."""
        jobs = GaugeMetricFamily("fedleak_jobs", "Jobs by state.", labels=["state"])
        for state, count in self._queue.count_states().items():
            jobs.add_metric([state], count)
        yield jobs
        runs = self._catalogue.list_runs()
        yield GaugeMetricFamily("fedleak_recordings", "Recordings below the root.", value=len(runs))
        yield GaugeMetricFamily("fedleak_rounds", "Rounds in all recordings.", value=sum(run.summary["rounds"] for run in runs))
        seen = sum(run.summary["observations"] for run in runs)
        yield GaugeMetricFamily("fedleak_observations", "Observations in all recordings.", value=seen)
        behind = GaugeMetricFamily(
            "fedleak_rounds_behind", "Newest recorded round minus newest attacked round.", labels=["recording"]
        )
        now = time.time()
        for run in [run for run in runs if run.sources and now - (run.index.updated or 0) < GAUGE_SECONDS][:MAX_RECORDINGS]:
            behind.add_metric([run.id], _count_rounds_behind(self._catalogue, run))
        yield behind


def _count_rounds_behind(catalogue: Catalogue, run: CatalogueRun) -> int:
    """Return how many rounds, at least 0, the newest reconstruction of an attack (not of a null) is behind the recording."""
    attacks = [source for source in catalogue.list_sources(run) if not source.null]
    answered = [max(source.cases[key].rounds) for source in attacks for key in source.answers]
    return max(0, (run.summary["last_round"] or 0) - max(answered, default=0))


class MetricsMiddleware:
    """ASGI middleware that counts requests by route, method and status, and times them by route.

    A route is named by its path template, such as `/api/v1/jobs/{id}`. Event streams are counted but not timed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        metrics: Metrics = scope["app"].state.components.metrics
        started, status = time.perf_counter(), 500

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, note_status)
        finally:
            route = _get_template(scope)
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "DELETE") else "other"
            metrics.requests.labels(route, method, str(status)).inc()
            if not route.endswith("/events"):
                metrics.seconds.labels(route).observe(time.perf_counter() - started)


def _get_template(scope: Scope) -> str:
    """Return the path template of a request's route, with prefixes; "none" if no route was found."""
    template = str(getattr(scope.get("route"), "path", "none"))
    inner = scope["path"].startswith(f"{API_PREFIX}/") and not template.startswith(API_PREFIX)
    return API_PREFIX + template if inner and template != "none" else template
