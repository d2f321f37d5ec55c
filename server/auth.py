"""API keys: everything is guarded except a short list of operators' paths.

Denies by default: the list names what is open, so a route added elsewhere is guarded without code
here. The path is compared exactly as the router will see it (percent-decoded once, never normalised
further), so no spelling opens a guarded route.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from .api_keys import ApiKeys
from .errors import Failure
from .paths import route_path
from .tenants import note_tenant

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/startup", "/version", "/load", "/metrics"})


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
        tenant = None if header is None else self._keys.tenant(header)
        if tenant is not None:
            note_tenant(scope, tenant)
            await self._app(scope, receive, send)
            return
        await _refusal(is_missing=header is None).response()(scope, receive, send)


def _refusal(*, is_missing: bool) -> Failure:
    message = "The API key is not valid."
    if is_missing:
        message = "No API key was given. Send it as 'Authorization: Bearer KEY'."
    headers = {"WWW-Authenticate": "Bearer"}
    return Failure(401, message, code="invalid_api_key", headers=headers)
