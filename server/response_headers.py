"""Headers that every answer carries, refusals too: which request it answers, and how long it took."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .request_ids import request_id_of

NAMES = ("X-Request-Id", "openai-processing-ms")


class ResponseHeadersMiddleware:
    """Adds ``X-Request-Id`` and ``openai-processing-ms``: whole milliseconds to the first byte."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        name = request_id_of(scope).encode("ascii")

        async def adding(message: Message) -> None:
            if message["type"] == "http.response.start":
                took_ms = round((time.perf_counter() - begin) * 1000)
                added = [(b"x-request-id", name), (b"openai-processing-ms", b"%d" % took_ms)]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        await self._app(scope, receive, adding)
