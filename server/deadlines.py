"""How long a request may take: the server's limit, and what its client or a gateway says in a header.

A request whose time is up is given up and answered with an error; what it has generated so far is not taken for
an answer.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request

from ..engine.api import FinishReason, RequestOutput, RequestStream
from ..engine.errors import InvalidRequestError
from .errors import RequestTimeoutError

TIMEOUT_HEADER = "X-Request-Timeout"
"""In seconds, by the client."""
GATEWAY_HEADER = "X-Envoy-Expected-Rq-Timeout-Ms"
"""In milliseconds, by Envoy and what is built on it: after that time nobody listens."""
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


def timeout_s(request: Request, limit_s: float, *, is_awaited: bool) -> float | None:
    """Seconds from the request's arrival on; ``None``: as long as it takes.

    Args:
        limit_s: The server's; 0 for none.
        is_awaited: Whether its client waits, so that a gateway's patience counts.

    Raises:
        InvalidRequestError: a header is not a number above 0.
    """
    times = [limit_s] if limit_s else []
    times += _seconds(request, TIMEOUT_HEADER, 1.0)
    if is_awaited:
        times += _seconds(request, GATEWAY_HEADER, 1e-3)
    return min(times, default=None)


def _seconds(request: Request, name: str, unit_s: float) -> list[float]:
    text = request.headers.get(name)
    if text is None:
        return []
    value = float(text) * unit_s if _NUMBER.fullmatch(text.strip()) else 0.0
    if value <= 0.0:
        raise InvalidRequestError(f"{name} must be a number above 0, got {text[:32]!r}.")
    return [value]


class TimedStream(RequestStream):
    """A stream that ends with an error when its time is up.

    Args:
        stream: The engine's.
        deadline: By ``time.monotonic()``.
        on_timeout: Called when it has passed.

    Raises:
        RequestTimeoutError: from iteration and ``take``.
    """

    def __init__(
        self, stream: RequestStream, deadline: float, on_timeout: Callable[[], None]
    ) -> None:
        self._stream = stream
        self._on_timeout = on_timeout
        self._is_late = False
        left_s = max(0.0, deadline - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(left_s, self._give_up)

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._stream.prompt_token_ids

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        return self._in_time(await anext(aiter(self._stream)))

    def take(self) -> RequestOutput | None:
        """See :meth:`octavo.engine.api.RequestStream.take`."""
        output = self._stream.take()
        return None if output is None else self._in_time(output)

    def on_ready(self, callback: Callable[[], None]) -> None:
        """See :meth:`octavo.engine.api.RequestStream.on_ready`."""
        self._stream.on_ready(callback)

    def abort(self) -> None:
        """See :meth:`octavo.engine.api.RequestStream.abort`."""
        self._timer.cancel()
        self._stream.abort()

    def _give_up(self) -> None:
        self._is_late = True
        self._stream.abort()

    def _in_time(self, output: RequestOutput) -> RequestOutput:
        """``output``, unless it is the end that :meth:`_give_up` has made."""
        if not output.finished:
            return output
        self._timer.cancel()
        reasons = {one.finish_reason for one in output.outputs}
        if self._is_late and FinishReason.ABORT in reasons:
            self._on_timeout()
            raise RequestTimeoutError("The time for this request is up.")
        return output
