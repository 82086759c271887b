"""Construction of the HTTP application from routes, middleware and the objects that they use."""

import sqlite3
from pathlib import Path

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from starlette.middleware import Middleware

from attacker.service.authorisation import PAGE_POLICY, read_token
from attacker.service.events import Feed
from attacker.service.http import audits, cases, feeds, general, jobs, previews, recordings, reports
from attacker.service.http.caching import ResponseCache, make_tagged_response
from attacker.service.http.dependencies import ServiceComponents
from attacker.service.http.errors import add_error_handlers
from attacker.service.http.metrics import Metrics, MetricsMiddleware
from attacker.service.http.middleware import API_PREFIX, CLIENT_SECONDS, Guard
from attacker.service.index import Catalogue
from attacker.service.jobs.queue import Limits, Queue
from attacker.service.sessions import Keys
from attacker.service.settings import ServiceSettings
from attacker.service.state_folder import claim_folder

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".webmanifest": "application/manifest+json",
}
PAGE_FOLDER = Path(__file__).parent.parent / "web"
ROUTERS = (
    general.router,
    recordings.router,
    cases.router,
    reports.router,
    audits.router,
    jobs.router,
    previews.router,
    feeds.router,
)
API_DESCRIPTION = (
    "Recordings of federations, the attacks on them, and their results. Lists have `items` and `next`; pass `next` "
    "as `after` to get the next page. Scores, originals and true labels are null if the service was given no truth."
)


def create_app(settings: ServiceSettings) -> FastAPI:
    """Return the application with the objects that its routes use, in `app.state.components`.

    The state folder and the token file are created if they are missing. No thread is started; `background.BackgroundWork` does
    that. Raises ValueError if the state folder or the token file may be under the control of another user, if the state folder
    cannot be written, or if the token file or the file of the queue is not valid.
    """
    app = make_app()
    app.state.components = make_components(settings)
    return app


def make_components(settings: ServiceSettings) -> ServiceComponents:
    """Return the objects that the routes use. Creates files and raises ValueError as `create_app` does."""
    try:
        state = claim_folder(settings.state_folder, adopt=settings.adopt_state)
        keys = Keys(read_token(settings.token_path), state / "sessions.json") if settings.token else None
        queue = Queue(state / "queue.sqlite", Limits(max_queued=settings.max_queued))
    except (OSError, sqlite3.Error) as error:
        raise ValueError(
            f"the queue and the token cannot be kept in {settings.state_folder}: {error}; name a writable folder with --state"
        ) from None
    catalogue = Catalogue(settings)
    return ServiceComponents(
        settings=settings,
        catalogue=catalogue,
        queue=queue,
        feed=Feed(),
        metrics=Metrics(queue, catalogue),
        keys=keys,
        replies=ResponseCache(),
    )


def make_app(*, patience: float = CLIENT_SECONDS) -> FastAPI:
    """Return the application with its routes, but without `app.state.components`, which the routes read at each request.

    patience: seconds in which a client must have sent the body of a request, or received one piece of the response.
    """
    app = FastAPI(
        title="fedleak",
        version="1",
        description=API_DESCRIPTION,
        openapi_url=f"{API_PREFIX}/openapi.json",
        docs_url=None,  # FastAPI's page loads scripts from another site
        redoc_url=None,
        middleware=[Middleware(MetricsMiddleware), Middleware(Guard, patience=patience)],
    )
    api = APIRouter(prefix=API_PREFIX)
    for router in ROUTERS:
        api.include_router(router)
    app.include_router(api)
    app.include_router(make_page_routes())
    app.add_api_route("/metrics", general.metrics, include_in_schema=False)
    add_error_handlers(app)
    return app


def make_page_routes() -> APIRouter:
    """Return routes for the files of the web page below `PAGE_FOLDER` that have a suffix in `CONTENT_TYPES`.

    The files are listed now, and paths of requests are never looked up on disk.

    index.html is served at /, icon.svg at /favicon.ico, and every file below /page/.
    """
    router = APIRouter(include_in_schema=False)
    paths = [path for path in sorted(PAGE_FOLDER.rglob("*")) if path.suffix in CONTENT_TYPES]
    files = {path.relative_to(PAGE_FOLDER).as_posix(): path for path in paths}

    @router.get("/")
    async def index(request: Request) -> Response:
        return _respond_file(request, files.get("index.html"))

    @router.get("/page/{name:path}")
    async def file(request: Request, name: str) -> Response:
        return _respond_file(request, files.get(name))

    @router.get("/favicon.ico")
    async def icon(request: Request) -> Response:
        return _respond_file(request, files.get("icon.svg"))

    return router


def _respond_file(request: Request, path: Path | None) -> Response:
    if path is None or not path.is_file():
        raise HTTPException(404)
    headers = {"Content-Security-Policy": PAGE_POLICY}
    return make_tagged_response(request, path.read_bytes(), CONTENT_TYPES[path.suffix], headers)
