"""Event streams, and clients that go away.

Both kinds of answer watch the connection while they wait for the engine: when the client closes it,
the work is cancelled and the caller's ``close`` gives the engine's requests up at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

COMMENT = b": keep-alive\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

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


BODY_WRITER = "octavo.body_writer"
"""Where a request's scope has its :class:`BodyWriter`, if the server has one."""


class BodyWriter(Protocol):
    """The way out of a body past the application's layers, for parts that need no waiting.

    To be used between the header and the last message of the body, which go the usual way: what is written leaves
    before anything that the writer schedules afterwards.
    """

    @property
    def is_open(self) -> bool:
        """Whether the client takes more at once. Where it is false, the usual way waits or ends."""

    @property
    def num_unsent_bytes(self) -> int:
        """Written, and not taken by the client's side yet."""

    def cut(self) -> None:
        """Close the connection at once, whatever has not been sent."""

    def write(self, data: bytes) -> None:
        """Send a part that is not empty."""


class EventSource(Protocol):
    """Encoded events that come by themselves."""

    @property
    def is_ended(self) -> bool:
        """Whether everything has been taken."""

    def take(self) -> bytes:
        """The events that have come since the last time; empty if none has."""

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called whenever there may be something to take."""


class LiveEventStream(Response):
    """A ``text/event-stream`` answer that sends events in the moment in which they come.

    While nobody has to be waited for, an event goes from its source to the connection in one call, without
    waking a task. When the client reads too slowly, the answer's task waits for it; events that come meanwhile
    stay in their source.

    Args:
        source: The events.
        close: Called once when the answer has ended for whatever reason.
        keep_alive_s: A comment is sent whenever nothing was for so long; 0 sends none.
    """

    media_type = "text/event-stream"

    def __init__(
        self, source: EventSource, close: Callable[[], None], *, keep_alive_s: float = 0.0
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._source = source
        self._close = close
        self._keep_alive_s = keep_alive_s
        self._writer: BodyWriter | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the task, while it has nothing to do
        self._last_send = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = scope.get(BODY_WRITER)
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientDisconnect:
            return
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        source = self._source
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._last_send = time.monotonic()
        source.on_ready(self._on_ready)
        while True:
            if data := source.take():
                await self._send(send, data)
            elif source.is_ended:
                break
            else:
                await self._idle(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._last_send = time.monotonic()

    async def _idle(self, send: Send) -> None:
        """Return when there is something that :meth:`_on_ready` has not sent; comment on silence."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            while self._keep_alive_s and not waiter.done():
                left = self._last_send + self._keep_alive_s - time.monotonic()
                if left <= 0:
                    await self._send(send, COMMENT)
                else:
                    await asyncio.wait({waiter}, timeout=left)
            await waiter
        finally:
            self._waiter = None

    def _on_ready(self) -> None:
        waiter, writer = self._waiter, self._writer
        if waiter is None or waiter.done():
            return  # the task is at work and will look itself
        try:
            if writer is not None and writer.is_open:
                if data := self._source.take():
                    writer.write(data)
                    self._last_send = time.monotonic()
                if not self._source.is_ended:
                    return
            waiter.set_result(None)
        except Exception as error:  # noqa: BLE001 the answer's task raises it
            waiter.set_exception(error)


class EventStream(Response):
    """A ``text/event-stream`` answer.

    Args:
        events: Encoded events; the generator is closed in any case, if it was begun.
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
        self.init_headers(_HEADERS)
        self._events = events
        self._close = close
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        way = self._send_with_comments if self._keep_alive_s else self._send_all
        try:
            await until_disconnect(receive, way(send))
        except ClientDisconnect:
            return
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
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
        self._is_open = False  # between the headers and the end
        self.last_send = time.monotonic()

    async def send(self, message: Message) -> None:
        self._is_open = message.get("more_body", True)
        await self._send(message)
        self.last_send = time.monotonic()

    async def comment(self) -> None:
        if self._is_open:
            await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        self.last_send = time.monotonic()
