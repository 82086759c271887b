"""Routes to submit, list and cancel jobs, and to run again those that failed, were cancelled or were set aside."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from attacker.service.http.dependencies import Service, ServiceComponents
from attacker.service.http.errors import RequestError
from attacker.service.http.middleware import API_PREFIX
from attacker.service.http.queries import REFUSED_CHANGE, REFUSED_RESPONSES, After, Limit, Name, check_parameters
from attacker.service.index import UnknownName
from attacker.service.jobs.job import Job, JobSpec, JobState
from attacker.service.schemas.general import Page, Problem
from fedsim.recording.selection import parse_rounds

router = APIRouter(prefix="/jobs", tags=["jobs"], dependencies=[Depends(check_parameters)])

WRONG_STATE_RESPONSE: dict[int | str, dict[str, Any]] = {
    409: {"model": Problem, "description": "The state of the job does not allow this."}
}
QUEUE_FULL_RESPONSE: dict[int | str, dict[str, Any]] = {
    429: {"model": Problem, "description": "The queue is full."},
    503: {"model": Problem, "description": "The disk is full."},
}
MAX_NAMES = 100
Nothing = Annotated[dict[str, Any] | None, Body(description="An empty object, {}.")]
REQUIRED_BODY: dict[str, Any] = {"requestBody": {"required": True}}


@router.get("", response_model=Page[Job], responses=REFUSED_RESPONSES)
def jobs(
    service: Service,
    state: Annotated[JobState | None, Query()] = None,
    recording: Annotated[str | None, Query(min_length=1, max_length=300)] = None,
    limit: Limit = 100,
    after: After = None,
) -> Page[Job]:
    """List jobs, the last submitted first. `state` and `recording` select the jobs in this state and on this recording.

    A response holds up to `limit` jobs. Its `next`, passed as `after`, gets the jobs that follow; it is null if there are none.
    """
    listed = service.queue.list(state=state, recording=recording, limit=limit + 1, after=after)
    return Page(items=listed[:limit], next=listed[limit - 1].id if len(listed) > limit else None)


@router.post("", response_model=Job, status_code=201, responses=REFUSED_CHANGE | QUEUE_FULL_RESPONSE)
async def submit(request: Request, response: Response, service: Service, spec: JobSpec) -> Job:
    """Submit a job that attacks a recording, runs the null unless `null` is false, and scores both if the service has truth."""
    await run_in_threadpool(_check, service, spec)
    job = await run_in_threadpool(service.queue.submit, spec)
    response.headers["Location"] = f"{API_PREFIX}/jobs/{job.id}"
    return job


@router.get("/{id}", response_model=Job, responses=REFUSED_RESPONSES)
def job(service: Service, id: Name) -> Job:
    """Return one job."""
    return service.queue.get(id)


@router.post("/{id}/cancel", response_model=Job, responses=REFUSED_CHANGE | WRONG_STATE_RESPONSE, openapi_extra=REQUIRED_BODY)
def cancel(service: Service, id: Name, nothing: Nothing = None) -> Job:
    """Cancel a waiting job at once, or ask a running one to save its best results so far and end.

    A job that has ended is refused with status 409.
    """
    return service.queue.cancel(id)


@router.post(
    "/{id}/retry",
    response_model=Job,
    responses=REFUSED_CHANGE | WRONG_STATE_RESPONSE | QUEUE_FULL_RESPONSE,
    openapi_extra=REQUIRED_BODY,
)
def retry(service: Service, id: Name, nothing: Nothing = None) -> Job:
    """Put a job back into the queue that failed, was cancelled, or was set aside because its workers died several times.

    A job in another state is refused with status 409.
    """
    return service.queue.retry(id)


def _check(service: ServiceComponents, spec: JobSpec) -> None:
    """Raise RequestError if a job cannot run on its recording.

    That is so if the recording is missing or cannot be read, if it lacks at least one of the clients that the job names, or if it
    has none of the rounds that the job names.
    """
    runs = service.catalogue.list_runs()
    try:
        run = service.catalogue.get_run(spec.recording)
    except UnknownName as error:
        known = [run.id for run in runs][:MAX_NAMES]
        raise RequestError(f"spec.recording: {error.args[0]}", field="spec.recording", known=known) from None
    if run.manifest is None:
        raise RequestError(f"spec.recording: {run.id} cannot be read: {run.summary['trouble'][0]}", field="spec.recording")
    clients = {row.client for rows in service.catalogue.get_rows(run).values() for row in rows}
    if unknown := sorted(set(spec.clients) - clients):
        known = sorted(clients)[:MAX_NAMES]
        raise RequestError(f"spec.clients: {run.id} holds no client {unknown[0]!r}", field="spec.clients", known=known)
    rounds = parse_rounds(spec.rounds)
    if rounds is not None and rounds.isdisjoint(run.index.rounds):
        last = run.summary["last_round"]
        raise RequestError(
            f"spec.rounds: {run.id} holds none of the rounds {spec.rounds}; "
            f"{f'its last round is {last}' if last else 'it holds no rounds yet'}",
            field="spec.rounds",
        )
