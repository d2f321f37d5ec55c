"""Requests are understood and admitted one in a turn of the event loop.

A thousand that arrive together would otherwise hold the loop until the last of them is admitted, and with it what others
wait for: running streams' tokens, and probes that ask whether the server lives.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Turns:
    """Hands out turns in order; a turn ends when what its taker does next waits for something."""

    def __init__(self) -> None:
        self._is_free = True
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Return when it is the caller's turn: at once, if nobody has had one in this turn of the loop."""
        loop = asyncio.get_running_loop()
        if self._is_free:
            self._is_free = False
            loop.call_soon(self._next)
            return
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its request may have been given up
                waiter.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_free = True


class TurnMiddleware:
    """Lets a request go on in its turn when all of its body is there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def in_turn() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                await self._turns.take()
            return message

        await self._app(scope, in_turn, send)
