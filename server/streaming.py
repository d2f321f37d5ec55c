"""Event streams, and clients that go away.

Both kinds of answer watch the connection while they wait for the engine: when the client closes it,
the work is cancelled and the caller's ``close`` gives the engine's requests up at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

COMMENT = b": keep-alive\n\n"

Result = TypeVar("Result")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, unless the client goes away first: then it is cancelled.

    ``receive`` belongs to a request whose body has been read.

    Raises:
        ClientDisconnect: the client went away.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        await _cancel(working, watching)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A ``text/event-stream`` answer.

    Args:
        events: Encoded events; the generator is closed in any case.
        close: Called once when the answer has ended for whatever reason.
        keep_alive_s: A comment is sent whenever nothing was for so long; 0 sends none.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        close: Callable[[], None],
        *,
        keep_alive_s: float = 0.0,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._close = close
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        way = self._send_with_comments if self._keep_alive_s else self._send_all
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await until_disconnect(receive, way(body_send(scope, send)))
        except ClientDisconnect:
            return
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_with_comments(self, send: Send) -> None:
        """Every message is whole events, so that a comment between two of them splits none."""
        connection = _Watched(send)
        comments = asyncio.ensure_future(self._comment(connection))
        try:
            await self._send_all(connection.send)
        finally:
            await _cancel(comments)

    async def _comment(self, connection: _Watched) -> None:
        while True:
            await asyncio.sleep(connection.last_send + self._keep_alive_s - time.monotonic())
            if time.monotonic() - connection.last_send >= self._keep_alive_s:
                await connection.comment()


class _Watched:
    """An answer's way out that knows when something was last sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_open = True
        self.last_send = time.monotonic()

    async def send(self, message: Message) -> None:
        self._is_open = message.get("more_body", True)
        await self._send(message)
        self.last_send = time.monotonic()

    async def comment(self) -> None:
        if self._is_open:
            await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        self.last_send = time.monotonic()
