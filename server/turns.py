"""Requests are begun, understood and admitted one in a turn of the event loop.

A thousand that arrive together would otherwise hold the loop until the last of them is admitted, and with it what others
wait for: running streams' tokens, and probes that ask whether the server lives.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")

PER_TURN = 1
"""More fill the engine faster when a thousand come at once, and keep probes waiting (benchmarks/results)."""


class Turns:
    """Hands out ``PER_TURN`` places in each turn of the loop, in order."""

    def __init__(self) -> None:
        self.number = 0
        """Of the turn; stands still when nobody takes a place."""
        self._num_free = PER_TURN
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Return when it is the caller's turn: at once, if this turn of the loop has a place left."""
        loop = asyncio.get_running_loop()
        if self._num_free == PER_TURN:
            loop.call_soon(self._next)
        if self._num_free:
            self._num_free -= 1
            return
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next(self) -> None:
        self.number += 1
        self._num_free = PER_TURN
        while self._waiting and self._num_free:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its request may have been given up
                waiter.set_result(None)
                self._num_free -= 1
        if self._num_free < PER_TURN:
            asyncio.get_running_loop().call_soon(self._next)


class TurnMiddleware:
    """Lets a request begin in its turn, and go on in another one if the rest of its body comes later.

    Requests without a body are let through: they are probes, and cost little.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on when it is its turn."""
        if scope["type"] != "http" or scope["method"] in _WITHOUT_BODY:
            await self._app(scope, receive, send)
            return
        await self._turns.take()
        begun = self._turns.number

        async def in_turn() -> Message:
            message = await receive()
            is_whole = message["type"] == "http.request" and not message.get("more_body", False)
            if is_whole and self._turns.number != begun:
                await self._turns.take()
            return message

        await self._app(scope, in_turn, send)
