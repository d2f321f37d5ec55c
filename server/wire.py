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

from ..engine.api import FinishReason, RequestOutput
from .json_lines import encode_line
from .reports import (
    NOTHING,
    PromptReport,
    Report,
    Tokens,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)

DONE = b"data: [DONE]\n\n"


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
    tokens: Tokens = field(default_factory=Tokens)
    prompt: PromptReport | None = None  # where anything of it is wanted


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def error_event(body: Mapping[str, Any]) -> bytes:
    """The event that ends a stream which failed, before ``[DONE]``."""
    return event(encode_line(body))


class Wire(ABC):
    """One answer's shape. Its id, time and model are the same in every chunk.

    Args:
        response_id: The answer's id.
        model: The name it carries.
        has_usage: Whether chunks have a ``usage`` key (null but for the last).
        report: What is told of the tokens.
    """

    object_name: str
    chunk_name: str

    def __init__(
        self,
        response_id: str,
        model: str,
        *,
        has_usage: bool = False,
        report: Report = NOTHING,
    ) -> None:
        self.report = report
        self._head = {"id": response_id, "created": int(time.time()), "model": model}
        opening = {"id": response_id, "object": self.chunk_name, **self._head}
        self._prefix = b"data: " + encode_line(opening)[:-1] + b',"choices":['
        self._suffix = b',"usage":null}\n\n' if has_usage else b"}\n\n"

    @abstractmethod
    def opening(self, index: int, prompt_token_ids: list[int]) -> bytes:
        """The chunk that comes before a choice's first text; may be empty."""

    @abstractmethod
    def prompt(self, index: int, output: RequestOutput) -> bytes:
        """The chunk that says of the prompt what is wanted, where ``opening`` cannot; may be empty."""

    @abstractmethod
    def delta(self, index: int, text: str, tokens: Tokens | None = None) -> bytes:
        """A chunk with more text, and the tokens of which it is the last part."""

    @abstractmethod
    def closing(
        self,
        index: int,
        text: str,
        reason: FinishReason,
        stop_reason: int | str | None,
        tokens: Tokens | None = None,
    ) -> bytes:
        """The chunk or chunks with the last text and why it ended."""

    @abstractmethod
    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """One choice of a whole answer."""

    def repeat_usage(self, usage: Usage) -> None:
        """From here on chunks say this usage (``stream_options.continuous_usage_stats``)."""
        self._suffix = b',"usage":' + encode_line(usage.as_dict()) + b"}\n\n"

    def usage(self, usage: Usage) -> bytes:
        """The extra chunk of ``stream_options.include_usage``."""
        return self._prefix + b'],"usage":' + encode_line(usage.as_dict()) + b"}\n\n"

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

    def _chunk(self, *parts: bytes, more: bytes = b"") -> bytes:
        """
        Args:
            more: fields beside the choices.
        """
        return b"".join((self._prefix, *parts, b"]", more, self._suffix))

    def _ids(self, tokens: Tokens | None) -> dict[str, list[int]]:
        """The field for a choice's token ids, where they are wanted."""
        if not self.report.has_token_ids:
            return {}
        return {"token_ids": [] if tokens is None else tokens.ids}

    def _prompt_fields(self, prompt: PromptReport | None) -> dict[str, Any]:
        """The fields for ids and log-probabilities of a prompt, where they are wanted."""
        fields: dict[str, Any] = {}
        if prompt is not None and self.report.num_prompt_top is not None:
            fields["prompt_logprobs"] = prompt_logprobs(prompt.tokens.entries, self.report)
        if prompt is not None and self.report.has_token_ids:
            fields["prompt_token_ids"] = prompt.tokens.ids
        return fields


def _extension(choice: Choice) -> dict[str, Any]:
    return {"cumulative_logprob": choice.cumulative_logprob} if choice.is_ranked else {}


class CompletionWire(Wire):
    """``text_completion``: chunks look like the whole answer."""

    object_name = chunk_name = "text_completion"
    _DELTA_END = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]'

    def opening(self, index: int, prompt_token_ids: list[int]) -> bytes:
        return b""

    def prompt(self, index: int, output: RequestOutput) -> bytes:
        report = self.report
        if not report.has_echo and not report.has_token_ids:
            return b""
        prompt = PromptReport.of(output)
        echo, tokens = (prompt.text, prompt.tokens) if report.has_echo else ("", None)
        shape = self._shape(index, echo, tokens, None, None)
        own: dict[str, Any] = {"token_ids": []} if report.has_token_ids else {}
        return self._chunk(encode_line({**shape, **own, **self._prompt_fields(prompt)}))

    def delta(self, index: int, text: str, tokens: Tokens | None = None) -> bytes:
        if tokens is not None:
            shape = self._shape(index, text, tokens, None, None)
            return self._chunk(encode_line({**shape, **self._ids(tokens)}))
        start = b'{"index":%d,"text":' % index
        return b"".join((self._prefix, start, encode_line(text), self._DELTA_END, self._suffix))

    def closing(
        self,
        index: int,
        text: str,
        reason: FinishReason,
        stop_reason: int | str | None,
        tokens: Tokens | None = None,
    ) -> bytes:
        last = self._shape(index, text, tokens, reason, stop_reason)
        return self._chunk(encode_line({**last, **self._ids(tokens)}))

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text, tokens, prompt = "".join(choice.text), choice.tokens, choice.prompt
        if prompt is not None and self.report.has_echo:
            text = prompt.text + text
            both = Tokens([*prompt.tokens.ids], None, [*prompt.tokens.offsets], prompt.tokens.first)
            entries = prompt.tokens.entries
            both.entries = None if entries is None else [*entries]
            both.extend(tokens)
            shape = self._shape(index, text, both, choice.finish_reason, choice.stop_reason)
        else:
            shape = self._shape(index, text, tokens, choice.finish_reason, choice.stop_reason)
        return {**shape, **self._ids(tokens), **self._prompt_fields(prompt)}

    def _shape(
        self,
        index: int,
        text: str,
        tokens: Tokens | None,
        reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(tokens, self.report),
            "finish_reason": reason,
            "stop_reason": stop_reason,
        }


class ChatWire(Wire):
    """``chat.completion`` and ``chat.completion.chunk``."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    echo = ""  # that each answer begins with
    _OPEN_END = b',"logprobs":null,"finish_reason":null}'
    _DELTA_END = b"}" + _OPEN_END + b"]"

    def opening(self, index: int, prompt_token_ids: list[int]) -> bytes:
        start = b'{"index":%d,"delta":{"role":"assistant","content":""}' % index
        more = b""
        if self.report.has_token_ids:
            more = b',"prompt_token_ids":' + encode_line(prompt_token_ids)
        echo = self.delta(index, self.echo) if self.echo else b""
        return self._chunk(start, self._OPEN_END, more=more) + echo

    def prompt(self, index: int, output: RequestOutput) -> bytes:
        return b""

    def delta(self, index: int, text: str, tokens: Tokens | None = None) -> bytes:
        if tokens is not None:
            shape = {
                "index": index,
                "delta": {"content": text},
                "logprobs": chat_logprobs(tokens, self.report),
                "finish_reason": None,
            }
            return self._chunk(encode_line({**shape, **self._ids(tokens)}))
        start = b'{"index":%d,"delta":{"content":' % index
        return b"".join((self._prefix, start, encode_line(text), self._DELTA_END, self._suffix))

    def closing(
        self,
        index: int,
        text: str,
        reason: FinishReason,
        stop_reason: int | str | None,
        tokens: Tokens | None = None,
    ) -> bytes:
        """See :meth:`Wire.closing`. What text or tokens are left come in a chunk of their own before."""
        last = {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": stop_reason,
        }
        before = self.delta(index, text, tokens) if text or tokens else b""
        return before + self._chunk(encode_line(last))

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = self.echo + "".join(choice.text)
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(choice.tokens, self.report),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._ids(choice.tokens),
        }

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        return super().whole(choices, usage) | self._prompt_fields(choices[0].prompt)
