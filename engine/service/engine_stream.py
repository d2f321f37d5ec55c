"""The outputs of one request on their way from the engine's frames to the one who reads them.

Owns what has come and is not taken yet, and the id by which the engine knows the request. Must not know sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from ..api import CompletionOutput, RequestOutput
from ..scheduling.request import NewRequest
from .output import RequestState, merge_outputs


class EngineStream:
    """The outputs of one request. See :class:`octavo.engine.api.RequestStream`."""

    def __init__(self, state: RequestState, abort: Callable[[str], None]) -> None:
        self.state = state
        self._abort = abort
        self.engine_id: str | None = None  # by which the engine knows it now; None: it does not
        self._num_handed = 0  # times that an engine was given it
        self.callback: Callable[[], None] | None = None  # of the one who takes
        self._pending: list[CompletionOutput] = []
        self._pending_error: str | None = None  # why one of them failed
        self._is_ended = False
        self._death: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the one who reads

    @property
    def request_id(self) -> str:
        return self.state.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.state.prompt_token_ids

    def __aiter__(self) -> EngineStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while (output := self.take()) is None:
            if self._is_ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return output

    def take(self) -> RequestOutput | None:
        """See :meth:`octavo.engine.api.RequestStream.take`."""
        if not self._pending:
            if self._death is not None:
                raise self._death
            return None
        output = self.state.output(self._pending, self._pending_error)
        self._pending, self._pending_error = [], None
        self._is_ended = output.finished
        return output

    def on_ready(self, callback: Callable[[], None]) -> None:
        """See :meth:`octavo.engine.api.RequestStream.on_ready`."""
        self.callback = callback

    def abort(self) -> None:
        """See :meth:`octavo.engine.api.RequestStream.abort`."""
        self._abort(self.request_id)

    def hand(self, new: NewRequest) -> NewRequest:
        """Note that the engine is given ``new``, under an id of its own: nothing told of an older one counts."""
        suffix = f"~{self._num_handed}" if self._num_handed else ""
        self._num_handed += 1
        self.engine_id = new.request_id + suffix
        return replace(new, request_id=self.engine_id) if suffix else new

    def put(self, outputs: list[CompletionOutput], error: str | None) -> None:
        """Keep deltas until they are taken. :meth:`wake` is the caller's to call."""
        if self._pending:
            merge_outputs(self._pending, outputs)
        else:
            self._pending = outputs
        self._pending_error = error or self._pending_error

    def fail(self, death: Exception) -> None:
        self._death = death
        self.wake()

    def wake(self) -> None:
        """Tell the reader that there is something to take."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: the reader was cancelled
            waiter.set_result(None)
        if self.callback is not None:
            self.callback()
