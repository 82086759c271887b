"""All that the service does beside answering, put together: whoever hears of an end is answered with what came of it."""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from attacker.service.background import Works
from attacker.service.http.app import make_parts
from attacker.service.index import Arrived
from attacker.service.index import catalogue as catalogue_module
from attacker.service.jobs.job import FINAL_STATES, JobSpec
from attacker.service.settings import ServiceSettings
from attacker.service.supervisor import job_worker

NEVER = 3600.0
"""Seconds until the next look at the folders: only who asks for one gets one."""
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
def works(root: Path, application: FastAPI, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Works]]:
    """A service that sees scores of `digits` only once its worker has written them, and looks at folders by itself never."""
    monkeypatch.setattr(job_worker, "WORKER_PROGRAM", WORKER)
    os.replace(root / "digits" / "scores.jsonl", root / "digits" / "scores.aside")
    made: list[Works] = []

    def start() -> Works:
        application.state.parts = make_parts(
            ServiceSettings(root=root, truth="own", workers=1, every=NEVER, stand_by=False, token=False)
        )
        works = Works(application.state.parts)
        made.append(works)
        works.start()
        return works

    yield start
    for one in made:
        one.stop()


def scored(answer: Any) -> int:
    return sum(case["success"] is not None for case in answer["items"])


def test_who_asks_once_a_job_has_ended_is_answered_with_what_it_did(
    works: Callable[[], Works], application: FastAPI, ask_of: Callable[[FastAPI], Any]
) -> None:
    works()
    ask, queue = ask_of(application), application.state.parts.queue
    assert scored(ask.json("recordings/digits/cases")) == 0
    job = queue.submit(JobSpec(recording="digits", attack="exact"))
    until = time.monotonic() + 30
    while queue.get(job.id).state not in FINAL_STATES:
        assert time.monotonic() < until
    assert scored(ask.json("recordings/digits/cases")) == 12


def test_pages_are_told_of_the_recording_before_they_are_told_that_its_job_is_done(
    works: Callable[[], Works], application: FastAPI, ask_of: Callable[[FastAPI], Any]
) -> None:
    works()
    ask, parts = ask_of(application), application.state.parts
    publish, told = parts.feed.publish, list[tuple[str, int]]()

    def heard(kind: str, key: str, data: Any) -> None:
        """As a page that asks at once."""
        publish(kind, key, data)
        told.append((data["state"] if kind == "job" else kind, scored(ask.json("recordings/digits/cases"))))

    parts.feed.publish = heard
    parts.queue.submit(JobSpec(recording="digits", attack="exact"))
    until = time.monotonic() + 30
    while not told or told[-1][0] != "done":
        assert time.monotonic() < until
        time.sleep(0.01)
    assert ("recording", 12) in told[:-1]
    assert told[-1] == ("done", 12)


def test_a_round_of_a_run_that_is_being_recorded_is_handed_on_at_once(
    works: Callable[[], Works], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue_module, "RECORDING_SECONDS", 1e6)
    told: list[Arrived] = []
    arrived = Works.apply_rules

    def noted(self: Works, rounds: Sequence[Arrived]) -> None:
        told.extend(rounds)
        arrived(self, rounds)

    monkeypatch.setattr(Works, "apply_rules", noted)
    works()
    told.clear()
    with closing(sqlite3.connect(root / "digits" / "recording" / "index.sqlite")) as index, index:
        row = "INSERT INTO observations SELECT 3, client, node, 1, 'late', '', NULL, NULL, NULL, NULL, 0, '{}', received_at"
        index.execute(f"{row} FROM observations WHERE round = 1")
    until = time.monotonic() + 30
    while not told:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert [(one.recording, one.round) for one in told] == [("digits", 3)]
