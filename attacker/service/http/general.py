"""Routes of the service's health, its metrics, the list of attacks, login and logout."""

from functools import cache
from importlib.metadata import version
from inspect import signature
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from attacker.attacks import ATTACKS
from attacker.attacks.arguments import list_settable
from attacker.attacks.needs import NEEDS_OF_FILES
from attacker.attacks.registry import explain_unusable
from attacker.service.http.dependencies import Service
from attacker.service.http.errors import RequestError
from attacker.service.http.metrics import CONTENT_TYPE
from attacker.service.http.middleware import make_cookie_name, read_session
from attacker.service.http.queries import REFUSED_CHANGE, REFUSED_RESPONSES, check_parameters
from attacker.service.schemas.attacks import KnownAttack
from attacker.service.schemas.general import Health, Page
from attacker.service.sessions import SESSION_SECONDS
from defenses.registry import read_source, read_summary

router = APIRouter(tags=["service"], dependencies=[Depends(check_parameters)])

METRICS_RESPONSE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


class Token(BaseModel):
    """Body of a login: the token that a user enters on the page."""

    model_config = ConfigDict(extra="forbid")

    token: Annotated[str, Field(min_length=1, max_length=1000)]


@router.get("/health", response_model=Health)
async def health(service: Service) -> Health:
    """Return the status of the service, and whether its other routes need a token. This route needs none."""
    return Health(status="ok", version=version("fedleak"), token=service.keys is not None)


@router.get("/metrics", response_class=Response, responses=METRICS_RESPONSE | REFUSED_RESPONSES)
async def metrics(service: Service) -> Response:
    """Return metrics in the text format of Prometheus."""
    return Response(await run_in_threadpool(service.metrics.read), media_type=CONTENT_TYPE)


@router.get("/attacks", response_model=Page[KnownAttack], responses=REFUSED_RESPONSES)
async def attacks() -> Page[KnownAttack]:
    """List the registered attacks with their arguments, without those that need a file."""
    return Page(items=await run_in_threadpool(_list_attacks), next=None)


@cache
def _list_attacks() -> list[KnownAttack]:
    return [
        KnownAttack(
            name=name,
            summary=read_summary(ATTACKS[name]),
            needs=sorted(need.name.lower() for need in ATTACKS[name]().needs),
            source=read_source(ATTACKS[name]),
            arguments={
                argument: signature(ATTACKS[name]).parameters[argument].default for argument in list_settable(ATTACKS[name])
            },
        )
        for name in ATTACKS
        if not explain_unusable(name) and not NEEDS_OF_FILES & ATTACKS[name]().needs
    ]


@router.post("/session", status_code=204, response_class=Response, responses=REFUSED_CHANGE)
async def open_session(service: Service, given: Annotated[Token, Body()]) -> Response:
    """Exchange the token for a session cookie that scripts cannot read. Does nothing if no token is required."""
    response = Response(status_code=204)
    if service.keys is None:
        return response
    if not service.keys.is_token(given.token):
        raise RequestError(
            "the token is wrong; at its start the service prints a link with the token, and the path of the file that "
            "contains it",
            status=401,
            field="token",
        )
    _set(response, service, await run_in_threadpool(service.keys.open_session), SESSION_SECONDS)
    return response


@router.delete("/session", status_code=204, response_class=Response, responses=REFUSED_CHANGE)
async def close_session(request: Request, service: Service) -> Response:
    """End the session: its cookie becomes invalid, and the event streams that it opened end."""
    response = Response(status_code=204)
    if service.keys is not None:
        await run_in_threadpool(service.keys.close, read_session(request.headers, service.settings, service.keys))
    _set(response, service, "", 0)
    return response


def _set(response: Response, service: Service, value: str, seconds: int) -> None:
    secure = service.settings.certfile is not None
    response.set_cookie(
        make_cookie_name(service.settings, service.keys),
        value,
        max_age=seconds,
        path="/",
        secure=secure,
        httponly=True,
        samesite="strict",
    )
