"""Event streams, and clients that go away.

Both kinds of answer watch the connection while they wait for the engine: when the client closes it,
the work is cancelled and the caller's ``close`` gives the engine's requests up at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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
        headers: Further headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        close: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await until_disconnect(receive, self._send(start, send))
        except ClientDisconnect:
            return
        finally:
            self._close()

    async def _send(self, start: Mapping[str, Any], send: Callable[[Any], Awaitable[None]]) -> None:
        await send(start)
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
