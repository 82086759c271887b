"""Routes of the cases of attacks: their states, examples, and images."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request, Response

from attacker.report.pairs import ExamplePair
from attacker.service.http.caching import PNG_TYPE
from attacker.service.http.dependencies import Service, ServiceComponents
from attacker.service.http.middleware import API_PREFIX
from attacker.service.http.queries import (
    REFUSED_RESPONSES,
    AfterCase,
    Client,
    Limit,
    Name,
    Number,
    Round,
    check_parameters,
    complete_client,
    cut_page,
)
from attacker.service.index import CatalogueRun, UnknownName, images, views
from attacker.service.index.attack_folders import CaseEntry, Source, make_file_path
from attacker.service.index.images import NoImage
from attacker.service.index.json_lines import ShownScore
from attacker.service.index.reconstruction_files import WholeReconstruction, read_whole
from attacker.service.schemas.cases import CaseDetails, CaseExample, CaseSummary, NullExample
from attacker.service.schemas.general import Page

router = APIRouter(
    prefix="/recordings/{id}/cases", tags=["cases"], responses=REFUSED_RESPONSES, dependencies=[Depends(check_parameters)]
)

AttackQuery = Annotated[str | None, Query(min_length=1, max_length=200, description="An attack's `source`.")]
CaseVersion = Annotated[
    str | None,
    Query(
        pattern="^[0-9a-f]{1,16}$",
        description="Ignored; a new value makes browsers request the image again. The response is always the newest state.",
    ),
]
IMAGE_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"content": {PNG_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}


@router.get("", response_model=Page[CaseSummary])
async def cases(
    request: Request,
    service: Service,
    id: Name,
    attack: AttackQuery = None,
    client: Client = None,
    round: Round = None,
    limit: Limit = 100,
    after: AfterCase = None,
) -> Response:
    """List the cases of all attacks, or of one attack, sorted by attack and case."""
    last = _parse_place(after)

    def find_wanted(run: CatalogueRun) -> Iterator[CaseSummary]:
        scores = service.catalogue.get_scores(run)
        clients = (
            {case.client for source in service.catalogue.list_sources(run) for case in source.cases.values()} if client else set()
        )
        name = complete_client(client, clients)
        for source in service.catalogue.list_sources(run):
            if attack is not None and source.name != attack:
                continue
            rows = scores.get(source.name, {})
            null = service.catalogue.find_null(run, source)
            guessed = scores.get(null.name, {}) if null else {}
            for key in sorted(source.cases):
                case = source.cases[key]
                if (name is None or case.client == name) and (round is None or round in case.rounds):
                    yield views.describe_case(source, case, rows.get(key, ()), guessed.get(key, ()))

    def make(run: CatalogueRun) -> Page[CaseSummary]:
        page, next_place = cut_page(
            find_wanted(run), lambda row: (row["attack"], row["case"]), last, limit, lambda row: f"{row['attack']}/{row['case']}"
        )
        return Page(items=list(page), next=next_place)

    return await service.respond_of_run(request, id, make)


@router.get("/{source}/{case}", response_model=CaseDetails)
async def case_details(request: Request, service: Service, id: Name, source: Name, case: Name) -> Response:
    """Return one case: its loss curve, and its examples, beside the originals if the service has the truth."""
    return await service.respond_of_run(request, id, lambda run: load_case(service, run, source, case))


def load_case(service: ServiceComponents, run: CatalogueRun, source: str, case: str) -> CaseDetails:
    """Return one case of an attack with its examples, each beside the reconstruction by the attack's null, if there is one.

    source: name of the folder of the attack or null. case: key of the case. Raises UnknownName if the run has no such folder with
    a valid `attack.json`, or if this `attack.json` lists no such case.
    """
    of, facts, rows = _find_case(service, run, source, case)
    null = service.catalogue.find_null(run, of)
    answer = _read_answer(run, of, case, rows)
    beside = None
    if null is not None and case in null.cases:
        beside = _read_answer(run, null, case, list(service.catalogue.get_scores(run).get(null.name, {}).get(case, ())))
    null_rows = beside.rows if beside else []
    return views.describe_whole_case(of, facts, answer.whole, rows, null_rows, _list_examples(run, facts, answer, beside))


@router.get("/{source}/{case}/images/{n}.png", response_class=Response, responses=IMAGE_RESPONSE)
async def image(
    request: Request, service: Service, id: Name, source: Name, case: Name, n: Number, version: CaseVersion = None
) -> Response:
    """Return the reconstruction with index `n` in the attack's result as PNG. `version` is ignored, see `CaseVersion`."""

    def make(run: CatalogueRun) -> bytes:
        _find_case(service, run, source, case)
        return images.encode_reconstruction(run.folder, make_file_path(source, case), n, _get_data(run))

    return await service.respond_of_run(request, id, make, kind=PNG_TYPE)


@router.get("/{source}/{case}/pairs/{n}.png", response_class=Response, responses=IMAGE_RESPONSE)
async def assigned(
    request: Request, service: Service, id: Name, source: Name, case: Name, n: Number, version: CaseVersion = None
) -> Response:
    """Return as PNG the reconstruction that scoring assigned to the true example with index `n` in the case."""
    return await _respond_half(request, service, id, source, case, n, original=False)


@router.get("/{source}/{case}/originals/{n}.png", response_class=Response, responses=IMAGE_RESPONSE)
async def original(
    request: Request, service: Service, id: Name, source: Name, case: Name, n: Number, version: CaseVersion = None
) -> Response:
    """Return as PNG the true example with index `n` in the case, if the service has the truth."""
    return await _respond_half(request, service, id, source, case, n, original=True)


async def _respond_half(
    request: Request, service: ServiceComponents, id: str, source: str, case: str, n: int, *, original: bool
) -> Response:
    def make(run: CatalogueRun) -> bytes:
        _, _, rows = _find_case(service, run, source, case)
        if n >= len(rows) or (file := rows[n].pair) is None:
            raise NoImage(
                f"case {case} has no picture of example {n}: it is not scored, its attack failed, or the service has no truth"
            )
        halves = images.encode_pair(run.folder, file, _get_data(run))
        return halves.original if original else halves.reconstruction

    return await service.respond_of_run(request, id, make, kind=PNG_TYPE)


def _find_case(
    service: ServiceComponents, run: CatalogueRun, source: str, case: str
) -> tuple[Source, CaseEntry, list[ShownScore]]:
    """Return an attack's results, one case, and its score rows, which need truth. Raises UnknownName as `load_case`."""
    of = service.catalogue.get_source(run, source)
    if case not in of.cases:
        raise UnknownName(f"the attack {source} has no case {case[:100]!r} (updates attacked together) on {run.id}")
    return of, of.cases[case], list(service.catalogue.get_scores(run).get(source, {}).get(case, ()))


def _describe_state(source: Source, case: str, rows: Sequence[ShownScore]) -> str:
    """Return a hash of a case's files and score rows for image addresses, by which browsers cache images."""
    return sha256(repr((source.get_mark(case)[:1], rows)).encode()).hexdigest()[:8]


class _Answer(NamedTuple):
    """The stored result of one attack for a case.

    source: name of the attack's folder. whole: the reconstruction without its images; None if there is none that can be read.
    rows: score rows of the case. links: makes the addresses of its images.
    """

    source: str
    whole: WholeReconstruction | None
    rows: list[ShownScore]
    links: views.PictureLinks


def _read_answer(run: CatalogueRun, source: Source, case: str, rows: list[ShownScore]) -> _Answer:
    whole = None
    if case in source.answers:
        try:
            whole = read_whole(run.folder, make_file_path(source.name, case))
        except ValueError:  # the file was replaced since the last scan, or is damaged in a part that the scan does not read
            whole = None
    address = f"{API_PREFIX}/recordings/{quote(run.id)}/cases/{quote(source.name)}/{quote(case)}"
    return _Answer(source.name, whole, rows, views.PictureLinks(address, _describe_state(source, case, rows)))


def _list_examples(run: CatalogueRun, facts: CaseEntry, answer: _Answer, null: _Answer | None) -> list[CaseExample]:
    if run.manifest is None:
        return []
    data = run.manifest.data
    is_scored = any(row.state != "waiting" for row in answer.rows)

    def list_examples(answer: _Answer, nulls: Mapping[Any, NullExample]) -> list[tuple[Any, CaseExample]]:
        """Return pairs of the key of an example, its `ShownScore.place` or its index if nothing is scored, and the example."""
        file, cells = make_file_path(answer.source, facts.key), dict[int, ExamplePair]()
        if is_scored:
            rows = [row for row in answer.rows if row.state != "waiting"]
            if not data.is_image:
                cells = images.read_paired_rows(run.folder, rows, data)
            scored = views.describe_scored(rows, answer.links, cells, images=data.is_image, nulls=nulls)
            return [(row.place, example) for row, example in zip(rows, scored, strict=True)]
        if answer.whole is None:
            return []
        if not data.is_image:
            cells = images.read_rows(run.folder, file, answer.whole, data)
        return list(enumerate(views.describe_found(answer.whole, answer.links, cells, images=data.is_image, nulls=nulls)))

    nulls = {} if null is None else {key: views.reduce_to_null(example) for key, example in list_examples(null, {})}
    return [example for _, example in list_examples(answer, nulls)]


def _get_data(run: CatalogueRun) -> Any:
    if run.manifest is None:
        raise NoImage(f"no image of {run.id} can be shown, since its manifest cannot be read: {run.summary['trouble'][0]}")
    return run.manifest.data


def _parse_place(after: str | None) -> tuple[str, str] | None:
    source, _, case = (after or "").partition("/")
    return (source, case) if after is not None else None
