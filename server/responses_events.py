"""The events of a streamed response: their order, numbers and bytes.

The order is OpenAI's: ``response.created``, ``response.queued`` (in the background only),
``response.in_progress``, ``response.output_item.added``, ``response.content_part.added``, any number of
``response.output_text.delta``, ``response.output_text.done``, ``response.content_part.done``,
``response.output_item.done``, and ``response.completed``, ``response.incomplete`` or ``response.failed``.
A delta is put together from bytes that are the same for a whole stream and the JSON of its text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from .json_lines import encode_line
from .responses_items import message, output_part
from .responses_state import ResponseState, Status

_DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":'
_LAST = {Status.COMPLETED: "response.completed", Status.FAILED: "response.failed"}


class EventWriter:
    """Writes the events of one response; each call takes the next numbers."""

    def __init__(self, state: ResponseState) -> None:
        self._state = state
        self._number = 0
        self._place: dict[str, Any] = {
            "item_id": state.item_id,
            "output_index": 0,
            "content_index": 0,
        }
        self._delta_place = b"," + encode_line(self._place)[1:-1] + b',"delta":'

    def opening(self) -> list[bytes]:
        """Before the first token."""
        second = "response.queued" if self._state.is_background else "response.in_progress"
        return [self._whole("response.created"), self._whole(second)]

    def begin(self) -> list[bytes]:
        """With the first token: the message is announced."""
        state = self._state
        empty = message(state.item_id, "assistant", state.item_status, [])
        events = [self._whole("response.in_progress")] if state.is_background else []
        return [
            *events,
            self._event("response.output_item.added", {"output_index": 0, "item": empty}),
            self._event(
                "response.content_part.added", {**self._place, "part": output_part("", [])}
            ),
        ]

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """More text, or log-probabilities of tokens that have none."""
        number, self._number = self._number, self._number + 1
        told = encode_line(logprobs) if logprobs else b"[]"
        parts = (
            b"%d" % number,
            self._delta_place,
            encode_line(text),
            b',"logprobs":',
            told,
            b"}\n\n",
        )
        return _DELTA + b"".join(parts)

    def closing(self) -> list[bytes]:
        """The end of the response, and of its message unless it failed."""
        state = self._state
        done = []
        if state.has_begun and state.status is not Status.FAILED:
            part = state.part()
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            done = [
                self._event("response.output_text.done", {**self._place, **text}),
                self._event("response.content_part.done", {**self._place, "part": part}),
                self._event("response.output_item.done", {"output_index": 0, "item": state.item()}),
            ]
        return [*done, self._whole(_LAST.get(state.status, "response.incomplete"))]

    def _whole(self, kind: str) -> bytes:
        return self._event(kind, {"response": self._state.as_dict()})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        data = encode_line({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class EventLog:
    """The events of a response in the background, for whoever reads them and however often.

    The number of an event is its place in the log.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._is_closed = False
        self._grown = asyncio.Event()

    def append(self, events: Sequence[bytes]) -> None:
        self._events += events
        self.num_bytes += sum(map(len, events))
        self._wake()

    def close(self) -> None:
        """No more will come: readers end when they have read all."""
        self._is_closed = True
        self._wake()

    async def after(self, number: int) -> AsyncGenerator[bytes]:
        """Every event with a higher number, as they come."""
        at = number + 1
        while True:
            if at < len(self._events):
                new = self._events[at:]
                at += len(new)
                yield b"".join(new)
            elif self._is_closed:
                return
            else:
                await self._grown.wait()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
