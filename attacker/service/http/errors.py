"""Errors of the API in one format: the message, the wrong field, and the allowed values."""

import re
import sqlite3
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from attacker.attacks import ATTACKS
from attacker.attacks.arguments import list_settable
from attacker.service.events import TooManyListeners
from attacker.service.http.middleware import make_problem
from attacker.service.index import UnknownName as UnknownRecording
from attacker.service.index.images import NoImage
from attacker.service.jobs.job import JobSpec
from attacker.service.jobs.queue import TooManyJobs, WrongJobState
from attacker.service.jobs.queue_rows import UnknownJob
from fedsim.recording.safe_files import shorten

ERROR_MESSAGES = {"extra_forbidden": "there is no such field", "missing": "is needed"}
RETRY_LATER = {"Retry-After": "10"}


class RequestError(Exception):
    """Raised for a request that cannot be carried out.

    status: HTTP status of the response. field: name of the wrong field of the request, if there is one. known: the allowed values
    of this field, if they can be listed.
    """

    def __init__(self, message: str, *, status: int = 422, field: str | None = None, known: Sequence[str] | None = None) -> None:
        super().__init__(message)
        self.status, self.field, self.known = status, field, None if known is None else list(known)


def add_error_handlers(app: FastAPI) -> None:
    """Register handlers with `app` that turn exceptions of routes into error responses, `schemas.Problem` as JSON.

    Each type of exception has its HTTP status, such as 404 for an unknown name and 429 for a full queue.
    """
    for kind, status in (
        (UnknownRecording, 404),
        (UnknownJob, 404),
        (NoImage, 404),
        (WrongJobState, 409),
        (TooManyJobs, 429),
        (TooManyListeners, 503),
    ):
        app.add_exception_handler(kind, _make_handler(status))

    @app.exception_handler(sqlite3.OperationalError)
    async def answer_storage_error(request: Request, error: sqlite3.OperationalError) -> JSONResponse:
        message = f"the queue cannot be read or written now: {error}; check its disk, and try again"
        return JSONResponse(make_problem(message), 503, headers=RETRY_LATER)

    @app.exception_handler(RequestError)
    async def answer_request_error(request: Request, error: RequestError) -> JSONResponse:
        return JSONResponse(make_problem(str(error), error.field, error.known), error.status)

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> JSONResponse:
        messages = {404: f"there is nothing at {request.url.path[:200]!r}", 405: f"{request.method} is not supported there"}
        message = messages.get(error.status_code, str(error.detail))
        return JSONResponse(make_problem(message), error.status_code, headers=dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def answer_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(describe_errors(error.errors(), error.body if request.url.path.endswith("/jobs") else None), 422)


def _make_handler(status: int) -> Any:
    async def answer(request: Request, error: Exception) -> JSONResponse:
        message = str(error.args[0]) if error.args else str(error)
        return JSONResponse(make_problem(message), status, headers=RETRY_LATER if status in (429, 503) else None)

    return answer


def describe_errors(errors: Sequence[Any], spec: Any) -> dict[str, Any]:
    """Return the first of pydantic's errors in a request as a dict in the form of `schemas.Problem`.

    spec: content of the request if it submits a job, otherwise None. Fields of a job are named with the prefix `spec.`.
    """
    error = errors[0]
    where, *path = error["loc"]
    names = [str(part)[:100] for part in path if not (isinstance(part, str) and "[" in part)]
    if error["type"] == "json_invalid":
        return make_problem(f"the request is not JSON: {error.get('ctx', {}).get('error', error['msg'])}")
    message = error["msg"].removeprefix("Value error, ")
    if spec is not None and where == "body":
        names = ["spec", *(_find_argument(message, spec) if names == ["arguments"] else names)]
    field = ".".join(names[:3]) or None
    message = ERROR_MESSAGES.get(error["type"], "must be `next` of an earlier response" if field == "after" else message)
    if error["type"] not in (*ERROR_MESSAGES, "value_error") and isinstance(error["input"], str | int | float | None):
        message = f"{message}, got {shorten(error['input'])}"
    if error["type"] != "value_error":
        message = f"{field}: {message}" if field else f"a JSON object as the body of the request {message}"
    return make_problem(message, field, _list_known(field, error, spec))


def _find_argument(message: str, spec: Any) -> list[str]:
    """Return ["arguments", NAME] for the argument in `spec`, a request's content, that a message names; else ["arguments"]."""
    arguments = spec.get("arguments") if isinstance(spec, dict) else None
    arguments = arguments if isinstance(arguments, dict) else {}
    named = [name for name in arguments if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message)]
    return ["arguments", *named[:1]]


def _list_known(field: str | None, error: Any, spec: Any) -> list[str] | None:
    if field == "spec.attack":
        return list(ATTACKS)
    if field is not None and field.startswith("spec.arguments") and spec.get("attack") in list(ATTACKS):
        return list(list_settable(ATTACKS[spec["attack"]]))
    if error["type"] == "extra_forbidden" and field is not None and field.startswith("spec"):
        return list(JobSpec.model_fields)
    if error["type"] == "literal_error":
        return [part.strip(" '") for part in str(error["ctx"]["expected"]).replace(" or ", ",").split(",")]
    return None
