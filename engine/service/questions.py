"""Questions to the engine that wait for their answers.

Owns a future for each. Must not know what becomes of the engine: whoever does fails them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from ..api import KVSnapshot
from ..errors import OctavoError
from .frames import Answer, KVSnapshotRequest, ResetPrefixCache, ToEngine


class Questions:
    """Questions that travel by ``send``."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[KVSnapshot | None]] = {}
        self._ids = count()

    async def ask(
        self, question: Callable[[int], KVSnapshotRequest | ResetPrefixCache]
    ) -> KVSnapshot | None:
        """Send a question and wait for its answer, or for the end of the engine."""
        question_id = next(self._ids)
        answer: asyncio.Future[KVSnapshot | None] = asyncio.get_running_loop().create_future()
        self._waiting[question_id] = answer
        self._send(question(question_id))
        try:
            return await answer
        finally:
            self._waiting.pop(question_id, None)

    def answer(self, frame: Answer) -> None:
        """Hand an answer over. Whoever asked may have stopped waiting."""
        answer = self._waiting.get(frame.question_id)
        if answer is not None and not answer.done():
            answer.set_result(frame.snapshot)

    def fail(self, reason: OctavoError) -> None:
        """Tell all who wait that no answer comes."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(reason)
