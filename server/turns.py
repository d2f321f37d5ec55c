"""What clients send is taken in one piece in a turn of the event loop.

A thousand requests that arrive together would otherwise hold the loop until the last of them is admitted, and with it what
others wait for: running streams' tokens, and probes that ask whether the server lives.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

PER_TURN = 1
"""More fill the engine faster when a thousand come at once, and keep probes waiting (benchmarks/results)."""


class Turns:
    """Hands out ``PER_TURN`` places in each turn of the loop, in order."""

    def __init__(self) -> None:
        self._num_free = PER_TURN
        self._waiting: deque[Callable[[], None]] = deque()

    def call(self, callback: Callable[[], None]) -> None:
        """Call at once if this turn of the loop has a place left, else in a later one."""
        if self._num_free == PER_TURN:
            asyncio.get_running_loop().call_soon(self._next)
        if self._num_free:
            self._num_free -= 1
            callback()
        else:
            self._waiting.append(callback)

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        self._num_free = PER_TURN
        while self._waiting and self._num_free:
            loop.call_soon(self._waiting.popleft())
            self._num_free -= 1
        if self._num_free < PER_TURN:
            loop.call_soon(self._next)
