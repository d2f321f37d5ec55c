"""Responses that can be retrieved and continued, in memory and bounded.

Bounded in number and in bytes; each response counts with its whole conversation, so that those before it
may go. The least recently used goes first. Responses that are being generated in the background stay, and
no more of them begin than there is room for; one that grows past the room that is left has to end.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ..engine.api import RequestStream
from ..engine.errors import InvalidRequestError, OverloadedError
from .responses_events import EventLog, EventWriter
from .responses_items import Item
from .responses_metrics import STORE_REASON, ResponseMetrics
from .responses_state import ResponseState, Status


@dataclass(eq=False)
class Stored:
    """A response that has ended."""

    id: str
    status: Status
    is_background: bool
    body: bytes  # OpenAI's object, encoded
    items: Sequence[Item]  # the conversation up to it
    output: Sequence[Item]
    log: EventLog | None = None
    owner: str | None = None
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        events = self.log.num_bytes if self.log else 0
        texts = sum(item.num_bytes for item in (*self.items, *self.output))
        self.num_bytes = len(self.body) + texts + events

    @classmethod
    def of(cls, state: ResponseState, items: Sequence[Item], log: EventLog | None) -> Stored:
        """What stays of a response."""
        body = msgspec.json.encode(state.as_dict())
        output = state.items()
        return cls(
            state.id, state.status, state.is_background, body, items, output, log, state.owner
        )


@dataclass(eq=False)
class Running:
    """A response that is being generated in the background."""

    state: ResponseState
    items: Sequence[Item]  # the conversation up to it
    stream: RequestStream
    writer: EventWriter
    log: EventLog | None = None  # where its events are wanted
    task: asyncio.Task[None] | None = None
    num_item_bytes: int = field(init=False)
    num_counted_bytes: int = field(init=False, default=0)  # by the store

    def __post_init__(self) -> None:
        self.num_item_bytes = sum(item.num_bytes for item in self.items)

    @property
    def num_bytes(self) -> int:
        """Of the conversation, and of the answer so far."""
        events = self.log.num_bytes if self.log else 0
        return self.num_item_bytes + self.state.num_bytes + events

    @property
    def output(self) -> Sequence[Item]:
        return self.state.items()

    @property
    def id(self) -> str:
        return self.state.id

    @property
    def owner(self) -> str | None:
        return self.state.owner

    @property
    def status(self) -> Status:
        return self.state.status

    @property
    def is_background(self) -> bool:
        return True

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.state.as_dict())


Entry = Stored | Running


class ResponseStore:
    """Responses by their ids.

    Args:
        max_responses: 0 keeps none.
        max_bytes: Of all responses together.
        metrics: Is told how full the store is.
    """

    def __init__(self, max_responses: int, max_bytes: int, metrics: ResponseMetrics) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._running: dict[str, Running] = {}
        self._ended: OrderedDict[str, Stored] = OrderedDict()  # least recently used first
        self._num_ended_bytes = 0
        self._num_running_bytes = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_responses > 0

    def get(self, response_id: str, owner: str | None) -> Entry | None:
        """The response, if it is ``owner``'s; it is then the most recently used."""
        entry = self._ended.get(response_id) or self._running.get(response_id)
        if entry is None or entry.owner != owner:
            return None
        if response_id in self._ended:
            self._ended.move_to_end(response_id)
        return entry

    def check_room(self, items: Sequence[Item]) -> None:
        """Return if one more response with this conversation can be generated in the background.

        Raises:
            InvalidRequestError: it can never be.
            OverloadedError: others have to end before.
        """
        num_bytes = sum(item.num_bytes for item in items)
        if num_bytes > self._max_bytes:
            raise InvalidRequestError(
                f"The conversation takes {num_bytes} bytes, and the store for responses in the background "
                f"has {self._max_bytes} (--response-store-bytes).",
                param="background",
            )
        is_full = len(self._running) >= self._max_responses
        if is_full or self._num_running_bytes + num_bytes > self._max_bytes:
            raise OverloadedError(
                f"{len(self._running)} responses are being generated in the background, and the store "
                "has no room for another (--response-store-size, --response-store-bytes).",
                reason=STORE_REASON,
            )

    def begin(self, running: Running) -> None:
        """Keep a response until :meth:`settle`, whatever happens."""
        self._running[running.id] = running
        self._count(running)
        self._evict()

    def has_room_for(self, running: Running) -> bool:
        """Count what a response in the background has grown by; those that have ended make room for it.

        Returns:
            Whether there is so much.
        """
        self._count(running)
        if self._num_running_bytes + self._num_ended_bytes > self._max_bytes:
            self._evict()
        return self._num_running_bytes <= self._max_bytes

    def _count(self, running: Running) -> None:
        num_bytes = running.num_bytes
        self._num_running_bytes += num_bytes - running.num_counted_bytes
        running.num_counted_bytes = num_bytes

    def settle(self, running: Running) -> bool:
        """A response in the background has ended.

        Returns:
            Whether that is news.
        """
        if self._running.pop(running.id, None) is None:
            return False
        self._num_running_bytes -= running.num_counted_bytes
        self.keep(Stored.of(running.state, running.items, running.log))
        return True

    def keep(self, response: Stored) -> None:
        """Keep a response that has ended, unless it has no room even alone."""
        has_seat = len(self._running) < self._max_responses
        if not has_seat or self._num_running_bytes + response.num_bytes > self._max_bytes:
            self._metrics.evicted()
            self._tell()
            return
        self._ended[response.id] = response
        self._num_ended_bytes += response.num_bytes
        self._evict()

    def delete(self, response_id: str) -> None:
        """Forget a response that has ended, if it is kept."""
        response = self._ended.pop(response_id, None)
        if response is not None:
            self._num_ended_bytes -= response.num_bytes
        self._tell()

    def _evict(self) -> None:
        max_ended = self._max_responses - len(self._running)
        max_bytes = self._max_bytes - self._num_running_bytes
        while len(self._ended) > max_ended or self._num_ended_bytes > max(0, max_bytes):
            _, oldest = self._ended.popitem(last=False)
            self._num_ended_bytes -= oldest.num_bytes
            self._metrics.evicted()
        self._tell()

    def _tell(self) -> None:
        num_bytes = self._num_running_bytes + self._num_ended_bytes
        self._metrics.stored(len(self._ended), num_bytes, len(self._running))
