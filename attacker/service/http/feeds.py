"""Routes of server-sent events: changes of all recordings and jobs, or of one job."""

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from attacker.service.events import HEARTBEAT_SECONDS, Event, encode_event
from attacker.service.http.dependencies import Service, ServiceComponents
from attacker.service.http.previews import read_stamp, read_version
from attacker.service.http.queries import REFUSED_RESPONSES, Name, check_parameters
from attacker.service.jobs.job import FINAL_STATES, Job
from attacker.service.schemas.general import Problem

router = APIRouter(tags=["events"], dependencies=[Depends(check_parameters)])

EVENT_STREAM_TYPE = "text/event-stream"
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
STREAM_RESPONSES: dict[int | str, dict[str, Any]] = REFUSED_RESPONSES | {
    200: {"content": {EVENT_STREAM_TYPE: {"schema": {"type": "string"}}}},
    503: {"model": Problem, "description": "The number of listeners has reached its limit."},
}
Last = Annotated[str | None, Header(alias="Last-Event-ID", max_length=100)]
PREVIEW_POLL_SECONDS = 1.0
"""Seconds between two checks for a new preview."""


@router.get("/events", response_class=StreamingResponse, responses=STREAM_RESPONSES)
async def events(service: Service, last: Last = None) -> StreamingResponse:
    """Stream `hello`, which states whether missed events follow, then `recording`, `job` and `removed` events as they happen."""
    feed = service.feed.listen(last)
    first = await anext(feed)
    return StreamingResponse(_stream_all(service, first, feed), media_type=EVENT_STREAM_TYPE, headers=STREAM_HEADERS)


async def _stream_all(service: ServiceComponents, first: Event | None, feed: AsyncIterator[Event | None]) -> AsyncIterator[bytes]:
    yield encode_event(first, service.feed.make_id(first) if first else "")
    async for event in feed:
        yield encode_event(event, service.feed.make_id(event) if event else "")


@router.get("/jobs/{id}/events", response_class=StreamingResponse, responses=STREAM_RESPONSES)
async def job_events(service: Service, id: Name) -> StreamingResponse:
    """Stream a `job` event now and at each change, and a `preview` event for each new preview, until the job has ended."""
    feed = service.feed.listen(wanted=lambda event: event.kind == "job" and event.key == id, beat=PREVIEW_POLL_SECONDS)
    await anext(feed)
    job = await run_in_threadpool(service.queue.get, id)
    return StreamingResponse(_stream_job(service, job, feed), media_type=EVENT_STREAM_TYPE, headers=STREAM_HEADERS)


async def _stream_job(service: ServiceComponents, job: Job, feed: AsyncIterator[Event | None]) -> AsyncIterator[bytes]:
    yield encode_event(Event(0, "job", job.id, job.model_dump_json()))
    if job.state in FINAL_STATES:
        return
    shown, silent = 0, 0.0
    async for event in feed:
        if (now := read_stamp(service, job.id)) != shown:
            shown, version = now, await run_in_threadpool(read_version, service, job.id)
            if version is not None:
                silent = 0.0
                yield encode_event(Event(0, "preview", job.id, json.dumps({"version": version})))
        if event is not None:
            silent = 0.0
            yield encode_event(event)
            if Job.model_validate_json(event.data).state in FINAL_STATES:
                return
        else:
            silent += PREVIEW_POLL_SECONDS
            if silent >= HEARTBEAT_SECONDS:
                silent = 0.0
                yield encode_event(None)
