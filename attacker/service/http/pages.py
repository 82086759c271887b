"""Routes of the web page's files. They are listed at the start, and paths of requests are never looked up on disk."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response

from attacker.service.authorisation import PAGE_POLICY
from attacker.service.http.caching import make_tagged_response

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".webmanifest": "application/manifest+json",
}
PAGE_FOLDER = Path(__file__).parent.parent / "web"


def make_page_routes() -> APIRouter:
    """Return routes for the files below `PAGE_FOLDER`, as listed now, that have a suffix in `CONTENT_TYPES`.

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
    headers: dict[str, Any] = {"Content-Security-Policy": PAGE_POLICY}
    return make_tagged_response(request, path.read_bytes(), CONTENT_TYPES[path.suffix], headers)
