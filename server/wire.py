"""What clients receive: OpenAI's objects, whole and in chunks.

A chunk is put together from bytes that are the same for a whole stream and the JSON of its text, so
that a token costs microseconds. Knows shapes only; what goes into them comes from ``generation``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..engine.api import FinishReason

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Usage:
    """Tokens of one request, over all of its prompts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Choice:
    """One whole answer."""

    text: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_ranked: bool = False  # by its log-probability, which it then carries
    cumulative_logprob: float | None = None


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def error_event(body: Mapping[str, Any]) -> bytes:
    """The event that ends a stream which failed, before ``[DONE]``."""
    return event(_encode(body))


class Wire(ABC):
    """One answer's shape. Its id, time and model are the same in every chunk.

    Args:
        response_id: The answer's id.
        model: The name it carries.
        has_usage: Whether chunks have a ``usage`` key (null but for the last).
    """

    object_name: str
    chunk_name: str

    def __init__(self, response_id: str, model: str, *, has_usage: bool = False) -> None:
        self._head = {"id": response_id, "created": int(time.time()), "model": model}
        opening = {"id": response_id, "object": self.chunk_name, **self._head}
        self._prefix = b"data: " + _encode(opening)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """The chunk that comes before a choice's first text; may be empty."""

    @abstractmethod
    def delta(self, index: int, text: str) -> bytes:
        """A chunk with more text."""

    @abstractmethod
    def closing(
        self, index: int, text: str, reason: FinishReason, stop_reason: int | str | None
    ) -> bytes:
        """The chunk or chunks with the last text and why it ended."""

    @abstractmethod
    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """One choice of a whole answer."""

    def usage(self, usage: Usage) -> bytes:
        """The extra chunk of ``stream_options.include_usage``."""
        return self._prefix + b'],"usage":' + _encode(usage.as_dict()) + b"}\n\n"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer to a request without ``stream``."""
        return {
            "id": self._head["id"],
            "object": self.object_name,
            **self._head,
            "choices": [
                self.choice(i, choice) | _extension(choice) for i, choice in enumerate(choices)
            ],
            "usage": usage.as_dict(),
        }

    def _chunk(self, *parts: bytes) -> bytes:
        return b"".join((self._prefix, *parts, self._suffix))


def _extension(choice: Choice) -> dict[str, Any]:
    return {"cumulative_logprob": choice.cumulative_logprob} if choice.is_ranked else {}


class CompletionWire(Wire):
    """``text_completion``: chunks look like the whole answer."""

    object_name = chunk_name = "text_completion"

    def opening(self, index: int) -> bytes:
        return b""

    def delta(self, index: int, text: str) -> bytes:
        end = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'
        return self._chunk(b'{"index":%d,"text":' % index, _encode(text), end)

    def closing(
        self, index: int, text: str, reason: FinishReason, stop_reason: int | str | None
    ) -> bytes:
        return self._chunk(_encode(self.choice(index, Choice([text], reason, stop_reason))))

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


class ChatWire(Wire):
    """``chat.completion`` and ``chat.completion.chunk``."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    _OPEN_END = b',"logprobs":null,"finish_reason":null}'

    def opening(self, index: int) -> bytes:
        start = b'{"index":%d,"delta":{"role":"assistant","content":""}' % index
        return self._chunk(start, self._OPEN_END)

    def delta(self, index: int, text: str) -> bytes:
        start = b'{"index":%d,"delta":{"content":' % index
        return self._chunk(start, _encode(text), b"}", self._OPEN_END)

    def closing(
        self, index: int, text: str, reason: FinishReason, stop_reason: int | str | None
    ) -> bytes:
        last = {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": stop_reason,
        }
        return (self.delta(index, text) if text else b"") + self._chunk(_encode(last))

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
