"""Which requests are in progress, and whether more may come.

A shutdown begins with a while in which nothing is refused, so that gateways learn of it by ``/ready`` before
requests fail. Then the port stays open but generation is refused, until those in progress are done or their
time is up.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine.errors import EngineNotReadyError


class Drain:
    """Counts requests in progress."""

    def __init__(self) -> None:
        self._is_announced = False
        self.is_draining = False  # it takes nothing new
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_active(self) -> int:
        """Requests in progress."""
        return self._num_active

    @property
    def is_stopping(self) -> bool:
        """Whether the server will end, so that gateways should look for another."""
        return self._is_announced or self.is_draining

    def announce(self) -> None:
        """The server will end, and takes requests for now."""
        self._is_announced = True

    def check_accepting(self) -> None:
        """Return while requests are taken.

        Raises:
            EngineNotReadyError: they are not any more.
        """
        if self.is_draining:
            raise EngineNotReadyError("The server is shutting down.")

    def check_ready(self) -> None:
        """Return unless the server is shutting down.

        Raises:
            EngineNotReadyError: it is, be it that requests are still taken.
        """
        if self.is_stopping:
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
