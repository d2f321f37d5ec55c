"""Which requests are in progress, and whether more may come.

At shutdown the port stays open but generation is refused, until those in progress are done or their
time is up.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine.errors import EngineNotReadyError


class Drain:
    """Counts requests in progress."""

    def __init__(self) -> None:
        self.is_draining = False
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_active(self) -> int:
        """Requests in progress."""
        return self._num_active

    def check_accepting(self) -> None:
        """Return unless the server is shutting down.

        Raises:
            EngineNotReadyError: it is.
        """
        if self.is_draining:
            raise EngineNotReadyError("The server is shutting down.")

    def enter(self) -> None:
        self._num_active += 1
        self._idle.clear()

    def leave(self) -> None:
        self._num_active -= 1
        if self._num_active == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Return as soon as no request is in progress."""
        await self._idle.wait()


class DrainMiddleware:
    """Keeps a :class:`Drain` informed. Only POST requests compute."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._drain.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.leave()
