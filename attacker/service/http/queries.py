"""Query parameters that routes share: limits, cursors of lists, and the refusal of unknown parameters."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Path, Query, Request

from attacker.service.http.errors import RequestError
from attacker.service.schemas.general import Problem
from fedsim.recording.selection import complete_names

MAX_ITEMS = 1000
"""Largest number of items in one response."""

Limit = Annotated[int, Query(ge=1, le=MAX_ITEMS, description="Largest number of items in the response.")]
After = Annotated[str | None, Query(max_length=600, description="`next` of the previous response.")]
AfterRow = Annotated[
    str | None, Query(pattern="^[0-9]{1,16}-[A-Za-z0-9_-]{1,64}$", description="`next` of the previous response.")
]
AfterCase = Annotated[
    str | None, Query(pattern="^[A-Za-z0-9_.-]{1,200}/[A-Za-z0-9_.-]{1,200}$", description="`next` of the previous response.")
]
Round = Annotated[int | None, Query(ge=1, lt=2**53)]
Client = Annotated[str | None, Query(min_length=1, max_length=64, description="A client's name, or a unique beginning of it.")]
Name = Annotated[str, Path(min_length=1, max_length=300)]
Number = Annotated[int, Path(ge=0, lt=2**31)]

T = TypeVar("T")

REFUSED_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The request is malformed."},
    401: {"model": Problem, "description": "The token is missing or wrong."},
    404: {"model": Problem, "description": "The resource does not exist."},
    422: {"model": Problem, "description": "A field is invalid; the response names it and explains how to correct it."},
}
REFUSED_CHANGE = REFUSED_RESPONSES | {
    403: {"model": Problem, "description": "The request comes from a page of another site."},
    408: {"model": Problem, "description": "The request did not arrive in time."},
    413: {"model": Problem, "description": "The request is too large."},
    415: {"model": Problem, "description": "The body is not JSON."},
}


def check_parameters(request: Request) -> None:
    """Raise RequestError if the request has a query parameter that its route does not declare, such as a misspelt one."""
    known = [parameter.alias for parameter in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            raise RequestError(f"{name[:100]}: this route has no such query parameter", field=name[:100], known=known)


def complete_client(client: str | None, known: Collection[str]) -> str | None:
    """Return the full name of a client, given its name or a unique beginning of it; None for None.

    client: the text in the request; if no name in `known` begins with it, it is returned unchanged. known: full names. Raises
    RequestError if `client` is not itself a name and several names begin with it.
    """
    if client is None:
        return None
    try:
        (name,) = complete_names([client], known)
    except ValueError as error:
        raise RequestError(str(error), field="client") from None
    return name


def cut_page(
    items: Iterable[T], key: Callable[[T], Any], after: Any, limit: int, cursor: Callable[[T], str]
) -> tuple[Sequence[T], str | None]:
    """Return the first `limit` items whose key is greater than `after`, and the cursor of the next page, None if there is none.

    items: sorted by key. after: a key, which need not be the key of an item; None for the first page. cursor: maps the last item
    of a page to the text from which the client requests the next page.
    """
    page: list[T] = []
    for item in items:
        if after is not None and key(item) <= after:
            continue
        if len(page) == limit:
            return page, cursor(page[-1])
        page.append(item)
    return page, None


def parse_cursor(after: str | None) -> tuple[int, str] | None:
    """Split a cursor "ROUND-CLIENT", such as "00012-3f2a", into round and client; None for None."""
    if after is None:
        return None
    number, _, client = after.partition("-")
    return int(number), client
