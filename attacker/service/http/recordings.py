"""Routes of recordings: their contents, and how much attacks recovered of them."""

from collections.abc import Callable
from itertools import chain
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response

from attacker.service.http.dependencies import Parts, Service
from attacker.service.http.errors import RequestError
from attacker.service.http.queries import (
    REFUSED,
    After,
    AfterRow,
    Client,
    Limit,
    Name,
    Round,
    complete_client,
    only_known,
    page,
    place,
)
from attacker.service.index import CatalogueRun, views
from attacker.service.index.grid import grid, leakage
from attacker.service.index.recording_index import IndexRow
from attacker.service.schemas import (
    AttacksOnRecording,
    Grid,
    Leakage,
    Observations,
    Recordings,
    RecordingTold,
    TrainingRows,
)

router = APIRouter(prefix="/recordings", tags=["recordings"], responses=REFUSED, dependencies=[Depends(only_known)])

Status = Annotated[Literal["complete", "masked", "failed", "late"] | None, Query()]
SourceQuery = Annotated[str | None, Query(min_length=1, max_length=200, description="An attack's `source`.")]


@router.get("", response_model=Recordings)
async def recordings(request: Request, service: Service, limit: Limit = 100, after: After = None) -> Response:
    """List all recordings below the root folder."""

    def make() -> Recordings:
        runs, rest = page(service.catalogue.runs(), lambda run: run.id, after, limit, lambda run: run.id)
        return Recordings(items=[run.told for run in runs], next=rest, trouble=list(service.catalogue.trouble))

    return await service.replies.told(request, service.catalogue.version, make)


async def _of_run(request: Request, service: Parts, id: str, make: Callable[[CatalogueRun], Any]) -> Response:
    run = service.catalogue.run(id)
    return await service.replies.told(request, run.version, lambda: make(run))


@router.get("/{id}", response_model=RecordingTold)
async def recording(request: Request, service: Service, id: Name) -> Response:
    """Return one recording, with everything that is wrong with its files."""
    return await _of_run(request, service, id, lambda run: {**run.told, "trouble": service.catalogue.trouble_of(run)})


@router.get("/{id}/observations", response_model=Observations)
async def observations(
    request: Request,
    service: Service,
    id: Name,
    round: Round = None,
    client: Client = None,
    status: Status = None,
    limit: Limit = 100,
    after: AfterRow = None,
) -> Response:
    """List the observations: what the server received, by round and client."""
    last = place(after)

    def make(run: CatalogueRun) -> Observations:
        rows = service.catalogue.rows(run)
        name = complete_client(client, {row.client for row in chain.from_iterable(rows.values())} if client else set())

        def wanted(row: IndexRow) -> bool:
            return (name is None or row.client == name) and (status is None or row.status == status)

        some = chain.from_iterable(rows.values()) if round is None else rows.get(round, ())
        found, rest = page(filter(wanted, some), lambda row: (row.round, row.client), last, limit, lambda row: row.key)
        return Observations(items=[views.observation(row) for row in found], next=rest)

    return await _of_run(request, service, id, make)


@router.get("/{id}/training", response_model=TrainingRows)
async def training(request: Request, service: Service, id: Name) -> Response:
    """Return what the server logged of each round: held-out loss and accuracy, and bytes."""
    return await _of_run(request, service, id, lambda run: TrainingRows(items=service.catalogue.training(run), next=None))


@router.get("/{id}/attacks", response_model=AttacksOnRecording)
async def attacks(request: Request, service: Service, id: Name) -> Response:
    """Return the results of each attack on a recording in numbers, nulls included."""

    def make(run: CatalogueRun) -> AttacksOnRecording:
        scores = service.catalogue.scores(run)
        verdicts = service.catalogue.verdicts(run)
        told = [views.attack(one, scores.get(one.name, {}), verdicts.get(one.name)) for one in service.catalogue.sources(run)]
        return AttacksOnRecording(items=told, next=None)

    return await _of_run(request, service, id, make)


@router.get("/{id}/grid", response_model=Grid)
async def of_clients_and_rounds(request: Request, service: Service, id: Name, attack: SourceQuery = None) -> Response:
    """Return a grid of clients by rounds: the highest leak of each observation, by one attack or by all but the nulls."""

    def make(run: CatalogueRun) -> Grid:
        chosen = [source for source in service.catalogue.sources(run) if not source.null]
        if attack is not None:
            chosen = [_source(service, run, attack)]
        return grid(service.catalogue.rows(run), chosen, service.catalogue.scores(run))

    return await _of_run(request, service, id, make)


@router.get("/{id}/leakage", response_model=Leakage)
async def over_rounds(request: Request, service: Service, id: Name) -> Response:
    """Return what each attack and null recovered in each round."""

    def make(run: CatalogueRun) -> Leakage:
        scores = service.catalogue.scores(run)
        sources = service.catalogue.sources(run)
        return Leakage(items=[leak for one in sources for leak in leakage(one, scores.get(one.name, {}))], next=None)

    return await _of_run(request, service, id, make)


def _source(service: Parts, run: CatalogueRun, name: str) -> Any:
    known = {source.name: source for source in service.catalogue.sources(run)}
    if name not in known:
        raise RequestError(f"there is no attack {name!r} on {run.id}", field="attack", known=list(known))
    return known[name]
