"""One response: what was asked, what has become of it so far, and OpenAI's object for both.

Must not know events, the store or the engine's streams.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from ..engine.api import CompletionOutput, FinishReason, SamplingParams
from .errors import Failure
from .reports import Report, Tokens, chat_logprobs
from .responses_items import Item, message, new_item_id, output_part
from .responses_request import ResponsesRequest
from .wire import Usage


class Status(StrEnum):
    """How far a response is."""

    QUEUED = "queued"  # in the background, without a first token
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"  # max_output_tokens or the window was reached
    CANCELLED = "cancelled"  # on demand, or because the server is shutting down
    FAILED = "failed"


_ENDS = {
    FinishReason.STOP: Status.COMPLETED,
    FinishReason.LENGTH: Status.INCOMPLETE,
    FinishReason.ABORT: Status.CANCELLED,
}
_LOGPROB_BYTES = 256  # of one token's


def new_response_id() -> str:
    """An id that nobody can guess: whoever knows it may read the response."""
    return f"resp_{secrets.token_hex(16)}"


def asked_fields(
    body: ResponsesRequest, sampling: SamplingParams, model: str, *, is_stored: bool
) -> dict[str, Any]:
    """What a response tells of its request, defaults filled in."""
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


class ResponseState:
    """A response while it is generated, and its end.

    Args:
        response_id: Its id.
        asked: See :func:`asked_fields`.
        report: What is told of the tokens.
        num_prompt_tokens: Of the whole prompt.
        owner: The tenant who asked; nobody else sees it.
    """

    def __init__(
        self,
        response_id: str,
        asked: Mapping[str, Any],
        report: Report,
        num_prompt_tokens: int,
        owner: str | None = None,
    ) -> None:
        self.id = response_id
        self.owner = owner
        self.item_id = new_item_id()
        self.usage = Usage(prompt_tokens=num_prompt_tokens)
        self.report = report
        self.is_background = bool(asked["background"])
        self.status = Status.QUEUED if self.is_background else Status.IN_PROGRESS
        self._asked = asked
        self._created_at = int(time.time())
        self._completed_at: int | None = None
        self.num_bytes = 0  # of text and log-probabilities so far, about
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._failure: Failure | None = None
        self._has_begun = False
        self._has_usage = False  # the engine has told the last of it

    # --- what becomes of it ----------------------------------------------------------------------

    def begin(self) -> None:
        """Its first token is there."""
        self._has_begun, self.status = True, Status.IN_PROGRESS

    def add(self, one: CompletionOutput, tokens: Tokens | None) -> list[dict[str, Any]]:
        """Take a piece of the answer in.

        Returns:
            The log-probabilities of its tokens, where they are wanted.
        """
        self.begin()
        self._text.append(one.text)
        told = chat_logprobs(tokens, self.report)
        logprobs: list[dict[str, Any]] = told["content"] if told else []
        self._logprobs += logprobs
        self.num_bytes += sys.getsizeof(one.text)
        self.num_bytes += sum(
            _LOGPROB_BYTES * (1 + len(token["top_logprobs"])) for token in logprobs
        )
        if one.finish_reason is not None:
            self._has_usage = True
            self._end(_ENDS[one.finish_reason])
        return logprobs

    def cancel(self) -> None:
        """It ends with what there is."""
        self._end(Status.CANCELLED)

    def fail(self, failure: Failure) -> None:
        """It ends, and its text is worth nothing."""
        self._failure = failure
        self._end(Status.FAILED)

    def outgrow(self, failure: Failure) -> None:
        """As :meth:`fail`; its text is forgotten, as there is no room for it."""
        self._text.clear()
        self._logprobs.clear()
        self._has_begun = False
        self.fail(failure)

    def _end(self, status: Status) -> None:
        self.status = status
        if status is Status.COMPLETED:
            self._completed_at = int(time.time())

    # --- what it looks like ----------------------------------------------------------------------

    @property
    def is_ended(self) -> bool:
        return self.status not in (Status.QUEUED, Status.IN_PROGRESS)

    @property
    def has_begun(self) -> bool:
        """Whether there is a message, be it without text so far."""
        return self._has_begun

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def item_status(self) -> str:
        if not self.is_ended:
            return "in_progress"
        return "completed" if self.status is Status.COMPLETED else "incomplete"

    def items(self) -> tuple[Item, ...]:
        """What the answer adds to the conversation."""
        if not self._has_begun:
            return ()
        return (Item(self.item_id, "assistant", (self.text,), self.item_status),)

    def part(self) -> dict[str, Any]:
        """The message's only part."""
        return output_part(self.text, self._logprobs)

    def item(self) -> dict[str, Any]:
        """The message."""
        return message(self.item_id, "assistant", self.item_status, [self.part()])

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's object. While it is generated there is no output in it."""
        is_full = self.is_ended and self._has_begun
        is_incomplete = self.status is Status.INCOMPLETE
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self.status,
            "error": self._error(),
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "output": [self.item()] if is_full else [],
            "usage": self._usage() if self._has_usage else None,
            **self._asked,
        }

    def _error(self) -> dict[str, str] | None:
        """Of OpenAI's codes the one for what is not the client's fault."""
        if self._failure is None:
            return None
        return {"code": "server_error", "message": self._failure.message}

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
