"""API keys: everything is guarded except a short list of operators' paths.

Denies by default: the list names what is open, so a route added elsewhere is guarded without code
here. The path is compared exactly as the router will see it (percent-decoded once, never normalised
further), so no spelling opens a guarded route.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import Failure
from .paths import route_path

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/startup", "/version", "/load", "/metrics"})


class ApiKeys:
    """The accepted keys, kept as digests."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def accepts(self, authorization: bytes) -> bool:
        """Whether an ``Authorization`` header carries one of the keys.

        Compares against every key, in constant time each: neither the time nor a non-ASCII byte
        tells anything.
        """
        scheme, _, token = authorization.partition(b" ")
        given = _digest(token.strip())
        is_known = False
        for digest in self._digests:
            is_known |= hmac.compare_digest(given, digest)
        return is_known and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class AuthMiddleware:
    """Answers 401 to requests without a valid key."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        header = next((v for k, v in scope["headers"] if k == b"authorization"), None)
        if header is not None and self._keys.accepts(header):
            await self._app(scope, receive, send)
            return
        await _refusal(is_missing=header is None).response()(scope, receive, send)


def _refusal(*, is_missing: bool) -> Failure:
    message = "The API key is not valid."
    if is_missing:
        message = "No API key was given. Send it as 'Authorization: Bearer KEY'."
    headers = {"WWW-Authenticate": "Bearer"}
    return Failure(401, message, code="invalid_api_key", headers=headers)
