"""Answers that stay what they are until their files change: made once, in a thread, kept as bytes, and known by a tag."""

import json
import secrets
from collections.abc import Callable
from hashlib import sha256
from typing import Any, NamedTuple

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from attacker.service.index.cache import Shelf

MOST_BYTES = 64 * 2**20
"""Of all answers that are kept."""
PIECE = 200
"""Items of a list that are written at once: longer ones would hold up every other answer."""
JSON = "application/json"
PNG = "image/png"


class CachedResponse(NamedTuple):
    content: bytes
    kind: str


class ResponseCache:
    """Answers by what was asked for, within a bound of bytes."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._run = secrets.token_hex(3)
        self._shelf: Shelf[CachedResponse] = Shelf(most, lambda reply: len(reply.content) + 500)

    async def told(self, request: Request, version: str, make: Callable[[], Any], *, kind: str = JSON) -> Response:
        """The answer to `request` in a version of what it is of; `make` gives what is written as JSON, or bytes of a `kind`."""
        key = (request.url.path, request.url.query)
        tag = f'"{self._run}-{version}"'
        headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
        reply = self._shelf.peek(key, version)
        if reply is None:
            reply = await run_in_threadpool(self._shelf.get, key, version, lambda before: _made(make, kind))
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(reply.content, media_type=reply.kind, headers=headers)

    @property
    def bytes(self) -> int:
        """Of all that is kept."""
        return self._shelf.weight


def tagged(request: Request, content: bytes, kind: str, headers: dict[str, str]) -> Response:
    """An answer that is known by its content."""
    tag = f'"{sha256(content).hexdigest()[:20]}"'
    headers = {**headers, "ETag": tag, "Cache-Control": "no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


def _made(make: Callable[[], Any], kind: str) -> CachedResponse:
    value = make()
    return CachedResponse(value if isinstance(value, bytes) else written(value), kind)


def written(value: Any) -> bytes:
    """As JSON; the long lists of an object piece by piece."""
    if not isinstance(value, dict):
        return _dumped(value)
    return b"{" + b",".join(_dumped(key) + b":" + _listed(part) for key, part in value.items()) + b"}"


def _listed(value: Any) -> bytes:
    if not isinstance(value, list) or len(value) <= PIECE:
        return _dumped(value)
    pieces = (_dumped(value[at : at + PIECE])[1:-1] for at in range(0, len(value), PIECE))
    return b"[" + b",".join(pieces) + b"]"


def _dumped(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
