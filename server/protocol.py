"""uvicorn's HTTP protocol with limits on what comes before a request's body, turns in which it is taken in, and a short
way out for streams.

A client that sends several requests at once and goes away is missed by none of them, and one that speaks
HTTP/1.0 gets no chunks, which it does not know.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from .streaming import BODY_WRITER
from .turns import Turns

MAX_HEADER_BYTES = 64 << 10
MAX_PIPELINED = 8
"""With more requests waiting behind the one that is answered, a connection is not read."""

_BODILESS = (b"GET ", b"HEAD ", b"OPTIONS ")
_END = b"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large" + _END
_TOO_LATE = b"HTTP/1.1 408 Request Timeout" + _END


class Outbox:
    """What leaves at the end of the event loop's turn, in order.

    A step brings every stream an event. Sent with no other work between, they disturb each other less: sending
    wakes whoever reads, which may take the core at once.
    """

    def __init__(self) -> None:
        self._items: list[tuple[asyncio.Transport, bytes]] = []

    def put(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send ``data`` before anything that is scheduled from now on."""
        if not self._items:
            asyncio.get_running_loop().call_soon(self._send)
        self._items.append((transport, data))

    def _send(self) -> None:
        items, self._items = self._items, []
        for transport, data in items:
            if not transport.is_closing():  # uvloop raises there, and what follows would be lost
                transport.write(data)


_outboxes: WeakKeyDictionary[ServerState, Outbox] = WeakKeyDictionary()
_turns: WeakKeyDictionary[ServerState, Turns] = WeakKeyDictionary()


class BodyWriter:
    """Implements :class:`octavo.server.streaming.BodyWriter` for one request."""

    def __init__(self, cycle: RequestResponseCycle, outbox: Outbox) -> None:
        self._cycle = cycle
        self._outbox = outbox

    @property
    def is_open(self) -> bool:
        """Whether the body has begun, in chunks, and the connection takes more without waiting."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    @property
    def num_unsent_bytes(self) -> int:
        """Written, and not taken by the client's side yet."""
        return self._cycle.transport.get_write_buffer_size()

    def cut(self) -> None:
        """Close the connection at once, whatever has not been sent."""
        self._cycle.transport.abort()

    def write(self, data: bytes) -> None:
        """Send ``data``, which is not empty, as one chunk."""
        self._outbox.put(self._cycle.transport, b"%x\r\n%b\r\n" % (len(data), data))


class HeaderLimitProtocol(HttpToolsProtocol):
    """Closes a connection that sends more than 64 KiB of request line and headers, or takes too long for them.

    The parser gathers them without a bound, before any route or key is looked at. A connection on which nothing
    has come yet is kept as long as an idle one.

    What comes waits for its turn, and the connection is not read meanwhile. Requests without a body do not wait: they are
    probes, and cost little.
    """

    head_timeout_s = 0.0
    """0: no limit."""

    _head_timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    _is_in_head = False
    _is_in_body = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unanswered: list[RequestResponseCycle] = []  # in order of arrival
        self._turns = _turns.setdefault(self.server_state, Turns())
        self._held = b""  # waits for its turn
        self._resumes_reading = False  # then

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        delay_s = self.timeout_keep_alive
        self.timeout_keep_alive_task = self.loop.call_later(
            delay_s, self.timeout_keep_alive_handler
        )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = 0
        self._is_in_head, self._is_in_body = True, False
        self._time_head()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._is_in_body = False, True
        self._stop_timer()
        super().on_headers_complete()
        self._unanswered = [one for one in self._unanswered if not one.response_complete]
        self._unanswered.append(self.cycle)
        if len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # else nobody sees that the client goes away
        if self.parser.get_http_version() != "1.1":
            _send_unchunked(self.cycle)
        elif self.scope["method"] != "HEAD":
            outbox = _outboxes.setdefault(self.server_state, Outbox())
            cast(dict[str, Any], self.scope)[BODY_WRITER] = BodyWriter(self.cycle, outbox)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._num_header_bytes = 0
        self._is_in_body = False

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells it to the newest request only, which may still wait for the others' answers."""
        self._stop_timer()
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._held:
            self._held += data
        elif data.startswith(_BODILESS):
            self._take_in(data)
        else:
            self._held = data
            self._turns.call(self._take_held)
        if self._held and not self.flow.read_paused:  # an answer that ends may have it read again
            self._resumes_reading = True
            self.flow.pause_reading()

    def shutdown(self) -> None:
        self._take_held()  # else it counts as idle
        super().shutdown()

    def _take_held(self) -> None:
        data, self._held = self._held, b""
        if self.transport.is_closing():
            return
        if self._resumes_reading:
            self._resumes_reading = False
            self.flow.resume_reading()
        if data:
            self._take_in(data)

    def _take_in(self, data: bytes) -> None:
        if not self._is_in_body:
            self._num_header_bytes += len(data)
            self._time_head()
        super().data_received(data)
        if not self._is_in_body and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(_TOO_LARGE)

    def _time_head(self) -> None:
        if self.head_timeout_s and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._held or any(not one.response_complete for one in self._unanswered):
            self._time_head()  # it may have come, or others' answers are under way on this connection
        elif not self.transport.is_closing():
            self._refuse(_TOO_LATE if self._is_in_head else b"")

    def _refuse(self, answer: bytes) -> None:
        self.transport.write(answer)
        self.transport.close()


def _send_unchunked(cycle: RequestResponseCycle) -> None:
    """Have the end of the connection end the body, unless the answer tells its length."""
    send = cycle.send

    async def unchunked(message: Any) -> None:
        cycle.chunked_encoding = False
        cycle.expected_content_length = len(message.get("body", b""))  # of this part
        await send(message)

    cycle.send = unchunked  # type: ignore[method-assign]
