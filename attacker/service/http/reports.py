"""Route of a run's report, which is made in a separate process and cached until the run changes."""

import asyncio
import os
import sys
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Depends, Request, Response

from attacker.service.authorisation import REPORT_POLICY
from attacker.service.http.caching import make_tagged_response
from attacker.service.http.dependencies import Service
from attacker.service.http.errors import RequestError
from attacker.service.http.queries import REFUSED_RESPONSES, Name, check_parameters
from attacker.service.index import CatalogueRun
from attacker.service.schemas.general import Problem
from attacker.service.worker.report_process import UNWRITTEN_STATUS
from fedsim.recording.files import make_private
from fedsim.recording.run_check import find_foreign

router = APIRouter(prefix="/recordings", tags=["recordings"], dependencies=[Depends(check_parameters)])

HTML_TYPE = "text/html; charset=utf-8"
REPORT_SECONDS = 120.0
REPORT_RESPONSES = REFUSED_RESPONSES | {
    200: {"content": {"text/html": {"schema": {"type": "string"}}}},
    409: {"model": Problem, "description": "No report can be made of this run."},
    503: {"model": Problem, "description": "The report takes too long."},
    507: {"model": Problem, "description": "The report cannot be written to the service's folder."},
}


@router.get("/{id}/report", response_class=Response, responses=REPORT_RESPONSES)
async def report(request: Request, service: Service, id: Name) -> Response:
    """Return the page that `attacker report` writes; without scores and originals if the service was given no truth."""
    run = service.catalogue.get_run(id)
    name = sha256(run.id.encode()).hexdigest()[:20]  # an id may be longer than the name of a file
    path = make_private(service.settings.state_folder / "reports") / f"{name}.{run.version}.html"
    async with service.reporting:
        if not path.exists():
            await _write_report(run, path)
        content = await asyncio.to_thread(path.read_bytes)
    return await asyncio.to_thread(make_tagged_response, request, content, HTML_TYPE, {"Content-Security-Policy": REPORT_POLICY})


async def _write_report(run: CatalogueRun, path: Path) -> None:
    """Delete older reports of a run, and write a new one to `path` in a separate process. Raises RequestError if that fails."""
    if foreign := await asyncio.to_thread(lambda: next(find_foreign(run.folder), None)):
        raise RequestError(f"{os.path.relpath(foreign.path, run.folder)} {foreign.reason}", status=409)
    for old in path.parent.glob(f"{path.name.partition('.')[0]}.*.html"):
        old.unlink(missing_ok=True)
    command = [sys.executable, "-m", "attacker.service.worker.report_process", str(run.folder), str(path)]
    if not run.summary["truth"]:
        command.append("--unscored")
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(REPORT_SECONDS):
            _, output = await process.communicate()
    except TimeoutError:
        raise RequestError(
            f"the report takes longer than {REPORT_SECONDS:.0f} seconds; make it on the command line with `attacker report`",
            status=503,
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == UNWRITTEN_STATUS:
        why = output.decode(errors="replace").strip()[-300:]
        raise RequestError(f"the report cannot be written into the service's folder: {why}; free disk space there", status=507)
    if process.returncode:
        last = (output.decode(errors="replace").strip().splitlines() or ["no reason was given"])[-1]
        raise RequestError(f"the report of {run.id} failed: {last[:300].replace(str(run.folder), run.id)}", status=409)
