"""Routes of recordings: their contents, and the results of attacks on them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response

from attacker.service.http.cases import load_case
from attacker.service.http.dependencies import Service, ServiceComponents
from attacker.service.http.errors import RequestError
from attacker.service.http.queries import (
    REFUSED_RESPONSES,
    After,
    AfterRow,
    Client,
    Limit,
    Name,
    Round,
    check_parameters,
    complete_client,
    cut_page,
    parse_cursor,
)
from attacker.service.index import CatalogueRun, UnknownName, views
from attacker.service.index.attack_folders import Source
from attacker.service.index.grid import compute_leakage, make_grid
from attacker.service.index.headline import find_strongest_source, find_worst_examples, make_headline
from attacker.service.index.json_lines import ShownScore
from attacker.service.schemas.attacks import AttackOnRecording, Grid, Leak
from attacker.service.schemas.cases import CaseDetails, Headline, ShownExample
from attacker.service.schemas.general import Page
from attacker.service.schemas.recordings import ObservationSummary, Recordings, RecordingSummary
from fedsim.recording import Row

router = APIRouter(
    prefix="/recordings", tags=["recordings"], responses=REFUSED_RESPONSES, dependencies=[Depends(check_parameters)]
)

Status = Annotated[Literal["complete", "masked", "failed", "late"] | None, Query()]
SourceQuery = Annotated[str | None, Query(min_length=1, max_length=200, description="An attack's `source`.")]


@router.get("", response_model=Recordings)
async def recordings(request: Request, service: Service, limit: Limit = 100, after: After = None) -> Response:
    """List all recordings below the root folder."""

    def make() -> Recordings:
        runs, rest = cut_page(service.catalogue.list_runs(), lambda run: run.id, after, limit, lambda run: run.id)
        root = None if service.catalogue.list_runs() else str(service.settings.root.absolute())
        return Recordings(items=[run.summary for run in runs], next=rest, trouble=list(service.catalogue.trouble), root=root)

    return await service.replies.respond(request, service.catalogue.version, make)


@router.get("/{id}", response_model=RecordingSummary)
async def recording(request: Request, service: Service, id: Name) -> Response:
    """Return one recording, with messages about everything that is wrong with its files."""
    return await service.respond_of_run(request, id, lambda run: {**run.summary, "trouble": service.catalogue.list_trouble(run)})


@router.get("/{id}/observations", response_model=Page[ObservationSummary])
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
    """List the observations, which are the messages that the server received, sorted by round and client."""
    last = parse_cursor(after)

    def make(run: CatalogueRun) -> Page[ObservationSummary]:
        rows = service.catalogue.get_rows(run)
        name = complete_client(client, {row.client for row in chain.from_iterable(rows.values())} if client else set())

        def is_wanted(row: Row) -> bool:
            return (name is None or row.client == name) and (status is None or row.status == status)

        some = chain.from_iterable(rows.values()) if round is None else rows.get(round, ())
        found, rest = cut_page(filter(is_wanted, some), lambda row: (row.round, row.client), last, limit, lambda row: row.key)
        return Page(items=[views.describe_observation(row) for row in found], next=rest)

    return await service.respond_of_run(request, id, make)


@router.get("/{id}/training", response_model=Page[dict[str, Any]])
async def training(request: Request, service: Service, id: Name) -> Response:
    """Return the server's log of each round: held-out loss and accuracy, and the bytes that all clients sent and received."""
    return await service.respond_of_run(request, id, lambda run: Page(items=service.catalogue.get_training(run), next=None))


@router.get("/{id}/attacks", response_model=Page[AttackOnRecording])
async def attacks(request: Request, service: Service, id: Name) -> Response:
    """Return the results of each attack on a recording as numbers, nulls included."""

    def make(run: CatalogueRun) -> Page[AttackOnRecording]:
        catalogue = service.catalogue
        items = views.describe_attacks(catalogue.list_sources(run), catalogue.get_scores(run), catalogue.get_verdicts(run))
        return Page(items=items, next=None)

    return await service.respond_of_run(request, id, make)


@router.get("/{id}/headline", response_model=Headline)
async def headline(request: Request, service: Service, id: Name) -> Response:
    """Return the verdict on a recording as a sentence, how much of it was attacked, and the examples that leaked most."""

    def make(run: CatalogueRun) -> Headline:
        catalogue = service.catalogue
        sources, scores, verdicts = catalogue.list_sources(run), catalogue.get_scores(run), catalogue.get_verdicts(run)
        top = find_strongest_source(sources, verdicts)
        return make_headline(
            catalogue.get_rows(run),
            sources,
            scores,
            verdicts,
            truth=run.summary["truth"],
            worst=list(_find_worst(service, run, top, scores.get(top.name, {}))) if top else [],
        )

    return await service.respond_of_run(request, id, make)


def _find_worst(
    service: ServiceComponents, run: CatalogueRun, source: Source, scores: Mapping[str, Sequence[ShownScore]]
) -> Iterator[ShownExample]:
    """Yield the examples that leaked worst, that is, that the attack `source` reconstructed best, each with its case.

    `find_worst_examples` selects them.

    scores: dict from the key of a case to the score rows of this attack.
    """
    cases: dict[str, CaseDetails] = {}
    for key, n in find_worst_examples(source, scores):
        if key not in cases:
            cases[key] = load_case(service, run, source.name, key)
        case = cases[key]
        if n < len(case["examples"]):
            yield ShownExample(
                attack=source.name, case=key, client=case["client"], rounds=case["rounds"], example=case["examples"][n]
            )


@router.get("/{id}/grid", response_model=Grid)
async def grid(request: Request, service: Service, id: Name, attack: SourceQuery = None) -> Response:
    """Return a table of clients by rounds.

    `leak`, from 0 to 1, is the share of examples that an attack recovered from the observation, or, without scores, the attack's
    mean confidence.
    attack: name of the attack or null that is shown. By default, each cell shows the attack with the highest leak, nulls
    excluded.
    """

    def make(run: CatalogueRun) -> Grid:
        chosen = [source for source in service.catalogue.list_sources(run) if not source.null]
        if attack is not None:
            chosen = [_find_source(service, run, attack)]
        nulls = service.catalogue.list_sources(run)
        return make_grid(service.catalogue.get_rows(run), chosen, service.catalogue.get_scores(run), nulls)

    return await service.respond_of_run(request, id, make)


@router.get("/{id}/leakage", response_model=Page[Leak])
async def leakage(request: Request, service: Service, id: Name) -> Response:
    """Return the results of each attack and null in each round."""

    def make(run: CatalogueRun) -> Page[Leak]:
        scores = service.catalogue.get_scores(run)
        sources = service.catalogue.list_sources(run)
        return Page(
            items=[leak for source in sources for leak in compute_leakage(source, scores.get(source.name, {}))], next=None
        )

    return await service.respond_of_run(request, id, make)


def _find_source(service: ServiceComponents, run: CatalogueRun, name: str) -> Any:
    try:
        return service.catalogue.get_source(run, name)
    except UnknownName as error:
        known = [source.name for source in service.catalogue.list_sources(run)]
        raise RequestError(str(error), field="attack", known=known) from None
