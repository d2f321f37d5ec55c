"""Headers that every answer carries, refusals too: which request it answers, and how long it took.

While the server is stopping they also end the connection, so that whoever keeps it open looks for another server.
"""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine.logs import request_id
from .drain import Drain
from .request_ids import request_id_of

_BEGIN = "octavo.begin"
NAMES = ("X-Request-Id", "openai-processing-ms")


class ResponseHeadersMiddleware:
    """Adds ``X-Request-Id`` and ``openai-processing-ms``: whole milliseconds to the first byte."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and its answer with the headers; with ``Connection: close`` in a shutdown."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_BEGIN] = time.perf_counter()
        request_id.set(request_id_of(scope))

        async def adding(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [
                    (name.lower().encode(), value.encode()) for name, value in own(scope).items()
                ]
                if self._drain.is_stopping:
                    added.append((b"connection", b"close"))
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        await self._app(scope, receive, adding)


def own(scope: Scope) -> dict[str, str]:
    """The headers at this moment, for an answer that does not pass the middleware."""
    took_ms = round((time.perf_counter() - scope[_BEGIN]) * 1000)
    return dict(zip(NAMES, (request_id_of(scope), str(took_ms)), strict=True))
