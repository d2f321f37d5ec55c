"""Clients that neither take their answers nor send their requests, though they keep the connection.

An answer that cannot leave waits in ``send``, and with it all that its request holds. Slow clients may be slow;
those that have stopped are cut off, and those that send a body byte by byte, which could go on for days.
Request lines and headers have their time in :mod:`.protocol`.
"""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .streaming import BODY_WRITER, BodyWriter

LEAST_BYTES_S = 1024
"""A body has the time of a stall, and another second for each so many bytes of it that have come."""

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
        """Pass the request on; reading its body and writing its answer are watched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        writer: BodyWriter | None = scope.get(BODY_WRITER)

        async def sending(message: Message) -> None:
            if writer is None:
                await send(message)
                return
            watch = _Watch(writer, self._timeout_s)
            try:
                await send(message)
            finally:
                watch.end()

        await self._app(scope, _BodyReader(receive, self._timeout_s), sending)


class _BodyReader:
    """``receive`` that waits for a body only as long as it comes."""

    def __init__(self, receive: Receive, timeout_s: float) -> None:
        self._receive = receive
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout_s
        self._has_more = True

    async def __call__(self) -> Message:
        if not self._has_more:
            return await self._receive()
        now = self._loop.time()
        until = min(self._deadline, now + self._timeout_s)
        try:
            async with asyncio.timeout_at(until):
                message = await self._receive()
        except TimeoutError:
            how = f"at less than {LEAST_BYTES_S} bytes a second"
            detail = f"The body stopped coming for {self._timeout_s:g} s, or came {how}."
            raise HTTPException(408, detail, headers={"Connection": "close"}) from None
        self._deadline += len(message.get("body", b"")) / LEAST_BYTES_S
        self._has_more = message.get("more_body", False)
        return message


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
