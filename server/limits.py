"""The size limit on request bodies, declared or chunked."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import describe_http

MAX_BODY_BYTES = 8 << 20


class BodyLimitMiddleware:
    """Answers 413 to bodies over ``max_bytes``: by their Content-Length, else by counting."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if declared.isdigit() and int(declared[:20]) > self._max_bytes:
            await describe_http(self._refusal()).response()(scope, receive, send)
            return
        await self._app(scope, self._counting(receive), send)

    def _counting(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._refusal()
            return message

        return counted

    def _refusal(self) -> HTTPException:
        detail = f"The body is larger than {self._max_bytes >> 20} MiB."
        return HTTPException(413, detail, headers={"Connection": "close"})
