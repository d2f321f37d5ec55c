"""Generates a response: as one answer, as events, or in the background.

Whatever ends it, the engine's request is given up and the state has its end. Failures of the engine end
a stream or a response in the background; a whole answer raises them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from ..engine.api import RequestStream
from ..engine.errors import EngineDeadError
from .drain import Drain
from .errors import INTERNAL, Failure, GenerationFailedError, describe
from .generation import pieces
from .responses_events import EventLog, EventWriter
from .responses_state import ResponseState
from .responses_store import ResponseStore, Running

logger = logging.getLogger(__name__)


OUTGROWN = Failure(
    503,
    "The response outgrew the store for responses in the background (--response-store-bytes).",
    code="response_store_full",
)


class OutgrownError(Exception):
    """The store has no room for more of a response in the background."""


async def finish(
    state: ResponseState, stream: RequestStream, on_growth: Callable[[], None] = lambda: None
) -> None:
    """Generate all of it.

    Args:
        on_growth: Called when more of it is there; what it raises ends it.

    Raises:
        EngineDeadError, GenerationFailedError: it cannot be.
    """
    async with aclosing(pieces(stream, state.report, state.usage)) as parts:
        async for one, tokens in parts:
            state.add(one, tokens)
            on_growth()


async def events(
    state: ResponseState,
    stream: RequestStream,
    writer: EventWriter,
    on_end: Callable[[], None] = lambda: None,
) -> AsyncGenerator[list[bytes]]:
    """Generate it, event by event.

    Args:
        on_end: Called when the response has ended, before its last events are out: who has read them
            may continue it.
    """
    yield writer.opening()
    try:
        async with aclosing(pieces(stream, state.report, state.usage)) as parts:
            async for one, tokens in parts:
                new = []
                if not state.has_begun:
                    state.begin()
                    new = writer.begin()
                logprobs = state.add(one, tokens)
                if one.text or logprobs:
                    new.append(writer.delta(one.text, logprobs))
                if new:
                    yield new
    except (EngineDeadError, GenerationFailedError) as error:
        state.fail(describe(error))
    on_end()
    yield writer.closing()


async def joined(batches: AsyncGenerator[list[bytes]]) -> AsyncGenerator[bytes]:
    """Events as they go to a client."""
    async with aclosing(batches) as closed:
        async for batch in closed:
            yield b"".join(batch)


class Background:
    """Generates responses that no connection waits for.

    Args:
        store: Has them, and keeps what becomes of them.
        drain: Counts them as requests in progress.
    """

    def __init__(self, store: ResponseStore, drain: Drain) -> None:
        self._store = store
        self._drain = drain

    def start(self, running: Running) -> None:
        """Begin to generate."""
        self._drain.enter()
        self._store.begin(running)
        running.task = asyncio.create_task(self._work(running))

    def cancel(self, running: Running) -> None:
        """End it with what there is."""
        running.stream.abort()
        self._settle(running)
        if running.task is not None:
            running.task.cancel()

    async def _work(self, running: Running) -> None:
        def on_growth() -> None:
            if not running.state.is_ended and not self._store.has_room_for(running):
                raise OutgrownError

        try:
            if running.log is None:
                await finish(running.state, running.stream, on_growth)
            else:
                parts = events(running.state, running.stream, running.writer)
                await _log(running.log, parts, on_growth)
        except OutgrownError:
            _outgrow(running)
        except (EngineDeadError, GenerationFailedError) as error:
            _fail(running, describe(error))
        except Exception:
            logger.exception("a response in the background cannot be generated")
            _fail(running, INTERNAL)
        finally:
            running.stream.abort()
            self._settle(running)

    def _settle(self, running: Running) -> None:
        """Once, at its end, whatever ended it."""
        state = running.state
        if not state.is_ended:
            state.cancel()
            if running.log is not None:
                running.log.append(running.writer.closing())
        if running.log is not None:
            running.log.close()
        if self._store.settle(running):
            self._drain.leave()


async def _log(
    log: EventLog, batches: AsyncGenerator[list[bytes]], on_growth: Callable[[], None]
) -> None:
    async with aclosing(batches) as closed:
        async for batch in closed:
            log.append(batch)
            on_growth()


def _outgrow(running: Running) -> None:
    """End it; who reads its events hears of it, and what stays is the reason alone."""
    running.state.outgrow(OUTGROWN)
    if running.log is not None:
        running.log.append(running.writer.closing())
        running.log.close()
        running.log = None


def _fail(running: Running, failure: Failure) -> None:
    running.state.fail(failure)
    if running.log is not None:
        running.log.append(running.writer.closing())
