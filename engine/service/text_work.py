"""Where the front end does its text work: on the event loop if it is little, else on a thread.

Owns the threads. What the work is, :mod:`.admission` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from ..api import ChatPrompt, GenerationRequest, Prompt, TextPrompt
from .admission import Admission, Admitted

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

THREAD_SIZE = 4096
"""Requests with more characters or token ids than this are admitted off the event loop."""
REQUEST_SIZE = 64
"""What admitting one more request costs beside its prompt, in characters."""
MAX_TEXT_THREADS = 2
"""More of them would keep the event loop waiting for its turn at the interpreter and the cores."""


class TextWork:
    """Does text work, whether little or much.

    Args:
        check: raises if nobody wants the work any more; asked after a thread was waited for.
    """

    def __init__(self, check: Callable[[], object]) -> None:
        self._check = check
        self._threads = ThreadPoolExecutor(MAX_TEXT_THREADS, "text")

    async def admit(
        self, admission: Admission, requests: Sequence[GenerationRequest]
    ) -> list[Admitted]:
        """Pass all of them through the door, or none."""
        size = sum(prompt_size(request.prompt) for request in requests)
        size += REQUEST_SIZE * (len(requests) - 1)
        return await self.run(size, _admit_all, admission, requests)

    async def run(
        self, size: int, work: Callable[[*Arguments], Result], *args: *Arguments
    ) -> Result:
        """Do ``work`` here if it is small, else on a thread: tokenising releases the GIL."""
        if size <= THREAD_SIZE:
            return work(*args)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._threads, work, *args)
        self._check()
        return result

    def close(self) -> None:
        """Take no more work. Those who wait hear of the end when theirs is done."""
        self._threads.shutdown(wait=False)


def prompt_size(prompt: Prompt) -> int:
    """Characters or token ids; a chat always counts as large, since its template may be slow."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return THREAD_SIZE + 1 if isinstance(prompt, ChatPrompt) else len(prompt.token_ids)


def _admit_all(admission: Admission, requests: Sequence[GenerationRequest]) -> list[Admitted]:
    return [admission.admit(request) for request in requests]
