"""Cache of the API's responses with entity tags. A response is made again after the files behind it have changed."""

import json
import secrets
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from attacker.service.index.cache import LRUCache

MAX_BYTES = 64 * 2**20
"""Largest size in bytes of all cached responses together."""
ITEMS_PER_PIECE = 200
"""Number of items of a list that are encoded at once; more would delay all other responses."""
JSON_TYPE = "application/json"
PNG_TYPE = "image/png"


class ResponseCache:
    """Cache of the newest response to each path and query.

    Above `MAX_BYTES` of all responses together, the least recently used ones are dropped.
    """

    def __init__(self) -> None:
        self._run = secrets.token_hex(3)
        self._shelf: LRUCache[bytes] = LRUCache(MAX_BYTES, lambda content: len(content) + 500)

    async def respond(self, request: Request, version: str, make: Callable[[], Any], *, kind: str = JSON_TYPE) -> Response:
        """Return the response to `request` from the cache, or make it if this version is not cached.

        If the client has this version already, the status is 304, and the response has no content.
        version: identifies the state of the files behind the response. make: returns a value to be encoded as JSON, or bytes.
        kind:    content type of the response.
        """
        key = (request.url.path, request.url.query)
        tag = f'"{self._run}-{version}"'
        headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
        content = self._shelf.peek(key, version)
        if content is None:
            content = await run_in_threadpool(self._shelf.get, key, version, lambda previous: _make_content(make))
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    @property
    def bytes(self) -> int:
        """Total size of all cached responses in bytes, with 500 for each as overhead."""
        return self._shelf.weight


def make_tagged_response(request: Request, content: bytes, kind: str, headers: dict[str, str]) -> Response:
    """Return a response with the hash of its content as entity tag, or status 304 if the client has that content already.

    kind: content type. headers: further headers of the response.
    """
    tag = f'"{sha256(content).hexdigest()[:20]}"'
    headers = {**headers, "ETag": tag, "Cache-Control": "no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


def _make_content(make: Callable[[], Any]) -> bytes:
    value = make()
    return value if isinstance(value, bytes) else _encode_json(value)


def _encode_json(value: Any) -> bytes:
    """Return JSON in UTF-8; long lists in a dict are encoded in pieces, so that other threads run in between."""
    if not isinstance(value, dict):
        return _encode_value(value)
    return b"{" + b",".join(_encode_value(key) + b":" + _encode_list(part) for key, part in value.items()) + b"}"


def _encode_list(value: Any) -> bytes:
    if not isinstance(value, list) or len(value) <= ITEMS_PER_PIECE:
        return _encode_value(value)
    pieces = (_encode_value(value[at : at + ITEMS_PER_PIECE])[1:-1] for at in range(0, len(value), ITEMS_PER_PIECE))
    return b"[" + b",".join(pieces) + b"]"


def _encode_value(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
