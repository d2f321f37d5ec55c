"""The size limit on request bodies, declared or chunked."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import describe_http

MAX_BODY_BYTES = 8 << 20
MAX_LINGER_BYTES = 64 << 20
MAX_LINGER_S = 5.0


class BodyLimitMiddleware:
    """Answers 413 to bodies over ``max_bytes``: by their Content-Length, else by counting.

    The rest of a refused body is read and dropped, within limits, before the connection is closed: a
    connection closed on unread bytes is reset, and a client that is still sending never sees the answer.
    """

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if declared.isdigit() and int(declared[:20]) > self._max_bytes:
            refusal = describe_http(self._refusal()).response()
            await refusal(scope, receive, _lingering(receive, send))
            return
        await self._with_counting(scope, receive, send)

    async def _with_counting(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._refusal()
            return message

        async def answered(message: Message) -> None:
            is_refused = num_bytes > self._max_bytes
            await (_lingering(receive, send) if is_refused else send)(message)

        await self._app(scope, counted, answered)

    def _refusal(self) -> HTTPException:
        detail = f"The body is larger than {self._max_bytes >> 20} MiB."
        return HTTPException(413, detail, headers={"Connection": "close"})


def _lingering(receive: Receive, send: Send) -> Send:
    """``send`` that ends an answer only when the rest of the request has come."""

    async def lingering(message: Message) -> None:
        if message["type"] != "http.response.body" or message.get("more_body", False):
            await send(message)
            return
        await send({**message, "more_body": True})
        await _drop_rest(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return lingering


async def _drop_rest(receive: Receive) -> None:
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(MAX_LINGER_S):
            while num_bytes < MAX_LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):  # the end, or the client has gone
                    return
