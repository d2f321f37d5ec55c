"""The name of a request: the client's ``X-Request-Id`` made harmless, else a random one; the engine's names for its parts."""

from __future__ import annotations

import re
import uuid

from starlette.requests import Request
from starlette.types import Scope

MAX_REQUEST_ID_CHARS = 64
_NOT_IN_IDS = re.compile(rb"[^A-Za-z0-9._-]")
_KEY = "octavo.request_id"


def request_id_of(scope: Scope) -> str:
    """The request's id; the same at every call with one ``scope``."""
    known: str | None = scope.get(_KEY)
    if known is None:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        kept = _NOT_IN_IDS.sub(b"", given[:MAX_REQUEST_ID_CHARS]).decode("ascii")
        scope[_KEY] = known = kept or uuid.uuid4().hex
    return known


def engine_request_ids(name: str, count: int) -> list[str]:
    """Names for the engine's requests, unique even if two clients chose the same ``name``."""
    unique = f"{name}-{uuid.uuid4().hex[:8]}"
    return [f"{unique}-{i}" for i in range(count)]


def request_id(request: Request) -> str:
    """:func:`request_id_of` for routes."""
    return request_id_of(request.scope)
