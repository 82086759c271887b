"""The objects that all routes of one service share."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request, Response

from attacker.service.events import Feed
from attacker.service.http.caching import JSON_TYPE, ResponseCache
from attacker.service.http.metrics import Metrics
from attacker.service.index import Catalogue, CatalogueRun
from attacker.service.jobs.queue import Queue
from attacker.service.sessions import Keys
from attacker.service.settings import ServiceSettings


@dataclass(frozen=True, kw_only=True)
class ServiceComponents:
    """The objects that all routes share: catalogue of recordings, job queue, event feed, metrics and caches of a service.

    keys: the token and the open sessions; None if no token is required. replies: cache of responses. reporting: lock that lets
    only one run's report, an HTML page, be made at a time.
    """

    settings: ServiceSettings
    catalogue: Catalogue
    queue: Queue
    feed: Feed
    metrics: Metrics
    keys: Keys | None
    replies: ResponseCache
    reporting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def respond_of_run(
        self, request: Request, id: str, make: Callable[[CatalogueRun], Any], *, kind: str = JSON_TYPE
    ) -> Response:
        """Return the response on the recording `id`, from the cache or by `make`, see `ResponseCache.respond`."""
        run = self.catalogue.get_run(id)
        return await self.replies.respond(request, run.version, lambda: make(run), kind=kind)


def _get_components(request: Request) -> ServiceComponents:
    components: ServiceComponents = request.app.state.components
    return components


Service = Annotated[ServiceComponents, Depends(_get_components)]
