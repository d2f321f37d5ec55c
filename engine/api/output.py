"""What a request has produced: text and tokens, log-probabilities, an embedding."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end id, a stop id or a stop string came."""
    LENGTH = "length"
    """``max_tokens`` or the model's window was reached."""
    ABORT = "abort"
    """The client went away or the server is shutting down."""
    ERROR = "error"
    """The row's logits were not finite; nothing sensible can follow."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural-log probability under the model, before any sampling filter."""

    logprob: float
    rank: int | None = None  # 1 is the most likely
    decoded_token: str | None = None  # U+FFFD where its bytes are no whole characters
    token_bytes: bytes = b""


@dataclass(slots=True)
class CompletionOutput:
    """One sequence's text: a delta when streamed, everything so far otherwise.

    Where log-probabilities (or aligned tokens) are asked for, a token comes with the last of its text:
    it waits while its bytes are no whole characters, or may belong to a stop string.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or stop string that ended it
    text_offsets: list[int] | None = None  # of aligned tokens: where each one's text begins
    num_cut_tokens: int = 0  # the last ones, which lie in a stop string that was cut off

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def lora_request(self) -> None:
        """Adapters are not served; scripts look here all the same."""


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, seconds of ``time.monotonic()``; ``None`` until they happened."""

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced. In a stream, ``outputs`` hold what is new since the last one."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    num_discarded_tokens: int = 0  # generated for sequences that best_of does not return
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the first token has none
    prompt_text_offsets: list[int] | None = None  # where each prompt token's text begins, with echo
    first_prompt_token: bytes = b""  # which has no log-probability to name it; with echo
    metrics: RequestMetrics | None = None
    error: str | None = None  # why an output ended with FinishReason.ERROR
    embedding: bytes | None = None  # little-endian float32, packed; see unpack_floats

    @property
    def lora_request(self) -> None:
        """Adapters are not served; scripts look here all the same."""

    @property
    def encoder_prompt(self) -> None:
        """No model with an encoder is served; scripts look here all the same."""

    @property
    def encoder_prompt_token_ids(self) -> None:
        """As :attr:`encoder_prompt`."""

    @property
    def kv_transfer_params(self) -> None:
        """Keys and values stay where they are; scripts look here all the same."""


def unpack_floats(packed: bytes) -> list[float]:
    """The numbers of an embedding."""
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))
