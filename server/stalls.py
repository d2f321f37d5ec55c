"""Clients that neither take their answers nor send their requests, though they keep the connection.

An answer that cannot leave waits in ``send``, and with it all that its request holds. Slow clients may be slow;
those that have stopped are cut off.
"""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .streaming import BODY_WRITER, BodyWriter

CHECKS = 4
"""So often in the time that a client has is it looked whether it moves."""


class StallMiddleware:
    """Cuts clients off that did nothing for ``timeout_s``, where something is to be done by them.

    Whoever waits for its answer to begin, or to go on, does nothing wrong.
    """

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        writer: BodyWriter | None = scope.get(BODY_WRITER)
        has_body = True

        async def receiving() -> Message:
            nonlocal has_body
            if not has_body:
                return await receive()
            try:
                async with asyncio.timeout(self._timeout_s):
                    message = await receive()
            except TimeoutError:
                detail = f"Nothing of the body came for {self._timeout_s:g} s."
                raise HTTPException(408, detail, headers={"Connection": "close"}) from None
            has_body = message.get("more_body", False)
            return message

        async def sending(message: Message) -> None:
            if writer is None:
                await send(message)
                return
            watch = _Watch(writer, self._timeout_s)
            try:
                await send(message)
            finally:
                watch.end()

        await self._app(scope, receiving, sending)


class _Watch:
    """Looks at a connection while something waits to be sent on it."""

    def __init__(self, writer: BodyWriter, timeout_s: float) -> None:
        self._writer = writer
        self._interval_s = timeout_s / CHECKS
        self._num_bytes: int | None = None
        self._num_still = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._interval_s, self._look)

    def end(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        num_bytes = self._writer.num_unsent_bytes
        has_moved = self._num_bytes is None or num_bytes < self._num_bytes
        self._num_still = 0 if has_moved else self._num_still + 1
        self._num_bytes = num_bytes
        if self._num_still >= CHECKS:
            self._writer.cut()
            return
        self._timer = self._loop.call_later(self._interval_s, self._look)
