"""Routes to start an audit of a recording, and to read its verdict.

An audit is a job that checks a recording and attacks it within a budget of time, for a graded verdict on what leaks.
"""

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt
from starlette.concurrency import run_in_threadpool

from attacker.service.audit_files import AuditPaths, make_audit_base, make_audit_paths
from attacker.service.authorisation import REPORT_POLICY
from attacker.service.http.caching import make_tagged_response
from attacker.service.http.dependencies import Service, ServiceComponents
from attacker.service.http.errors import RequestError
from attacker.service.http.jobs import QUEUE_FULL_RESPONSE
from attacker.service.http.middleware import API_PREFIX
from attacker.service.http.queries import REFUSED_CHANGE, REFUSED_RESPONSES, Name, check_parameters
from attacker.service.http.reports import HTML_TYPE
from attacker.service.jobs.job import FINAL_STATES, MAX_AUDIT_SECONDS, AuditSpec, Job
from attacker.service.schemas.general import Problem
from attacker.service.schemas.jobs import AuditFinding, AuditVerdict

router = APIRouter(dependencies=[Depends(check_parameters)])

VERDICT_RESPONSES: dict[int | str, dict[str, Any]] = REFUSED_RESPONSES | {
    409: {
        "model": Problem,
        "description": "The audit has no verdict yet, its files were deleted, or it shows truth that the service was not given.",
    }
}
PAGE_RESPONSES = VERDICT_RESPONSES | {200: {"content": {"text/html": {"schema": {"type": "string"}}}}}


class AuditRequest(BaseModel):
    """Body of the request for an audit.

    seconds: budget of time for the audit's attacks and their nulls (the same attacks without the updates): of expected processor
    time on one core when they are chosen, and of wall-clock time after which they are stopped. The checks are not counted.
    priority: among waiting jobs, the one with the highest priority runs first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: Annotated[StrictFloat | StrictInt, Field(gt=0, le=MAX_AUDIT_SECONDS, allow_inf_nan=False)] = 600
    priority: Annotated[StrictInt, Field(ge=-10, le=10)] = 0


@router.post(
    "/recordings/{id}/audit",
    tags=["recordings"],
    response_model=Job,
    status_code=201,
    responses=REFUSED_CHANGE | QUEUE_FULL_RESPONSE,
)
async def submit_audit(response: Response, service: Service, id: Name, audit: AuditRequest) -> Job:
    """Submit a job that checks a recording and attacks it within a budget of time, for a graded verdict."""
    run = await run_in_threadpool(service.catalogue.get_run, id)
    if run.manifest is None:
        raise RequestError(f"{run.id} cannot be read: {run.summary['trouble'][0]}")
    spec = AuditSpec(recording=run.id, seconds=audit.seconds, priority=audit.priority)
    job = await run_in_threadpool(service.queue.submit, spec)
    response.headers["Location"] = f"{API_PREFIX}/jobs/{job.id}"
    return job


@router.get("/jobs/{id}/audit", tags=["jobs"], response_model=AuditVerdict, responses=VERDICT_RESPONSES)
def verdict(service: Service, id: Name) -> AuditVerdict:
    """Return the verdict of the audit job `id`: all findings, and the grade of the worst one.

    The job must be in the state "done".
    """
    content = json.loads(_find_verdict(service, id).data.read_bytes())
    return AuditVerdict(
        grade=content["grade"],
        scored=content["scored"],
        seconds=content["seconds"],
        findings=[AuditFinding(**{key: finding[key] for key in AuditFinding.__annotations__}) for finding in content["findings"]],  # type: ignore[typeddict-item]
        passed=len(content["passed"]),
        not_checked=len(content["not_checked"]),
        page=f"{API_PREFIX}/jobs/{id}/audit/page",
    )


@router.get("/jobs/{id}/audit/page", tags=["jobs"], response_class=Response, responses=PAGE_RESPONSES)
async def verdict_page(request: Request, service: Service, id: Name) -> Response:
    """Return the verdict of the audit job `id` as the HTML page that `attacker audit` writes.

    The job must be in the state "done".
    """
    paths = await asyncio.to_thread(_find_verdict, service, id)
    content = await asyncio.to_thread(paths.page.read_bytes)
    return await asyncio.to_thread(make_tagged_response, request, content, HTML_TYPE, {"Content-Security-Policy": REPORT_POLICY})


def _find_verdict(service: ServiceComponents, id: str) -> AuditPaths:
    """Return the paths of the files with an audit's verdict.

    Raises UnknownJob if there is no such job, and RequestError if the job is not an audit, if it has no verdict yet, if the
    verdict's files were deleted, or if the verdict shows scores although the service was given no truth of the recording. Raises
    UnknownName if the verdict shows scores and its recording no longer exists.
    """
    job = service.queue.get(id)
    if not isinstance(job.spec, AuditSpec):
        raise RequestError(f"job {id} is not an audit; it attacks {job.spec.recording} by {job.spec.attack}", status=409)
    paths = make_audit_paths(make_audit_base(service.settings.state_folder, job.id))
    if job.state != "done" or job.result is None:
        advice = "audit the recording again" if job.state in FINAL_STATES else "wait until it is done"
        raise RequestError(f"the audit {id} has no verdict, since its state is {job.state!r}; {advice}", status=409)
    if missing := [path.name for path in paths if not path.exists()]:
        reason = f"the folder audits in the service's state folder lacks {' and '.join(missing)}"
        raise RequestError(f"the verdict of job {id} was deleted: {reason}; audit the recording again", status=409)
    if job.result.scored and not service.catalogue.get_run(job.spec.recording).summary["truth"]:
        raise RequestError("this verdict shows scores; it is served if the service is started with --truth", status=409)
    return paths
