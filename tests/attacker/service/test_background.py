"""Tests of the background work of the service: new scores and rounds are served and published without waiting for a scan."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from changed_recordings import add_round
from fastapi import FastAPI
from processes import wait_until

from attacker.service.background import BackgroundWork
from attacker.service.http.app import make_components
from attacker.service.index import ArrivedRound
from attacker.service.index import catalogue as catalogue_module
from attacker.service.jobs.job import FINAL_STATES, JobSpec
from attacker.service.settings import ServiceSettings
from attacker.service.supervisor import job_worker

NO_SCAN = 3600.0
"""Seconds between scans of the root, so many that none happens during a test."""
WORKER = """
import json, os, sys
out = os.fdopen(os.dup(1), "w")
def say(**said):
    out.write(json.dumps(said) + "\\n")
    out.flush()
say(ready=True)
for line in sys.stdin:
    run = json.loads(line)["run"]
    os.replace(run + "/scores.aside", run + "/scores.jsonl")
    say(answer={"state": "done", "result": {"scored": True}, "error": None})
"""


@pytest.fixture
def works(root: Path, application: FastAPI, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], BackgroundWork]]:
    """Function that starts a service without regular scans, in which the worker writes the scores of `digits`."""
    monkeypatch.setattr(job_worker, "WORKER_PROGRAM", WORKER)
    os.replace(root / "digits" / "scores.jsonl", root / "digits" / "scores.aside")
    made: list[BackgroundWork] = []

    def start() -> BackgroundWork:
        application.state.components = make_components(
            ServiceSettings(root=root, truth="own", workers=1, every=NO_SCAN, stand_by=False, token=False)
        )
        works = BackgroundWork(application.state.components)
        made.append(works)
        works.start()
        return works

    yield start
    for one in made:
        one.stop()


def count_scored(answer: Any) -> int:
    return sum(case["success"] is not None for case in answer["items"])


def test_scores_of_a_job_are_served_once_it_has_ended(
    works: Callable[[], BackgroundWork], application: FastAPI, ask_of: Callable[[FastAPI], Any]
) -> None:
    works()
    ask, queue = ask_of(application), application.state.components.queue
    assert count_scored(ask.json("recordings/digits/cases")) == 0
    job = queue.submit(JobSpec(recording="digits", attack="exact"))
    wait_until(lambda: queue.get(job.id).state in FINAL_STATES)
    assert count_scored(ask.json("recordings/digits/cases")) == 12


def test_recording_is_published_before_its_job_is_done(
    works: Callable[[], BackgroundWork], application: FastAPI, ask_of: Callable[[FastAPI], Any]
) -> None:
    works()
    ask, components = ask_of(application), application.state.components
    publish, noted_events = components.feed.publish, list[tuple[str, int]]()

    def publish_and_note(kind: str, key: str, data: Any) -> None:
        """Publish an event, and note how many scores a page would get if it asked at once."""
        publish(kind, key, data)
        noted_events.append((data["state"] if kind == "job" else kind, count_scored(ask.json("recordings/digits/cases"))))

    components.feed.publish = publish_and_note
    components.queue.submit(JobSpec(recording="digits", attack="exact"))
    wait_until(lambda: noted_events and noted_events[-1][0] == "done")
    assert ("recording", 12) in noted_events[:-1]
    assert noted_events[-1] == ("done", 12)


def test_new_round_is_passed_to_the_rules_at_once(
    works: Callable[[], BackgroundWork], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue_module, "RECORDING_SECONDS", 1e6)
    noted_events: list[ArrivedRound] = []
    arrived = BackgroundWork.apply_rules

    def noted(self: BackgroundWork, rounds: Sequence[ArrivedRound]) -> None:
        noted_events.extend(rounds)
        arrived(self, rounds)

    monkeypatch.setattr(BackgroundWork, "apply_rules", noted)
    works()
    noted_events.clear()
    add_round(root / "digits" / "recording", 3)
    wait_until(lambda: noted_events)
    assert [(one.recording, one.round) for one in noted_events] == [("digits", 3)]
