"""Request fields by what becomes of them: used, without effect, refused or unknown.

Clients of this API send many fields. Those that octavo uses are in ``schemas``. Here are the others
that are known:

* **without effect** here, and harmless: accepted in silence;
* **not supported**: they would change the answer, so a request that sets one to anything but its
  neutral value is refused by name. A neutral value (null always is one) asks for nothing.

A field that nobody knows is accepted, so that clients may be ahead of the server. Each such name is
logged once in a process life, at most :data:`UnknownFields.MAX_NAMES` names in all; its value never.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from ..engine.api import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
)
from ..engine.errors import InvalidRequestError, NotSupportedError

logger = logging.getLogger(__name__)

NO_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "include_reasoning",
        "session_id",
        "request_id",
        "spaces_between_special_tokens",
    }
)

_OFF: tuple[Any, ...] = (False,)
_EMPTY: tuple[Any, ...] = ([], {}, "")
_NULL: tuple[Any, ...] = ()

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    # tools and constraints
    "tools": _EMPTY,
    "tool_choice": ("none", "auto"),
    "functions": _EMPTY,
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": _EMPTY,
    "guided_json": _NULL,
    "guided_regex": _NULL,
    "guided_choice": _NULL,
    "guided_grammar": _NULL,
    "guided_decoding_backend": _NULL,
    "guided_whitespace_pattern": _NULL,
    "thinking_token_budget": _NULL,
    "repetition_detection": _NULL,
    "watermarking": (False, {}),
    # prompts
    "prompt_embeds": _NULL,
    "suffix": _EMPTY,
    "chat_template": _NULL,
    "documents": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "media_io_kwargs": _EMPTY,
    "mm_payload": _EMPTY,
    "kv_transfer_params": _EMPTY,
    "ec_transfer_params": _EMPTY,
    "vllm_xargs": _EMPTY,
    # answers
    "return_token_offsets": _OFF,
    "return_prompt_text": _OFF,
    "return_weight_versions": _OFF,
    "routed_experts_prompt_start": _NULL,
    "stream_interval": (1,),
    "modalities": (["text"],),
    "audio": _NULL,
    "prediction": _NULL,
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": _NULL,
}

_HINTS = {
    "prompt_embeds": "send text or token ids as prompt",
    "chat_template": "templates come from the operator only",
    "response_format": "only the type 'text' is offered",
    "top_logprobs": "logprobs is the number of alternatives here",
    "stream": "an embedding comes whole",
    "messages": "send texts or token ids as input",
}


def check_supported(
    body: Mapping[str, Any], extra: Mapping[str, tuple[Any, ...]] | None = None
) -> None:
    """Refuse fields that are known and not offered.

    Args:
        body: The decoded request.
        extra: Further fields with their neutral values, for one route.

    Raises:
        NotSupportedError: naming the first such field.
    """
    refused = {**NOT_SUPPORTED, **(extra or {})}
    for name, value in body.items():
        if name in refused and not is_neutral(value, refused[name]):
            hint = _HINTS.get(name)
            reason = f": {hint}" if hint else " yet"
            raise NotSupportedError(f"{name} is not supported{reason}.", param=name)


def is_neutral(value: Any, neutral: Collection[Any]) -> bool:
    """Whether ``value`` asks for nothing. Types count: true is not 1."""
    return value is None or any(type(value) is type(one) and value == one for one in neutral)


MAX_LENGTHS = {
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "logprob_token_ids": MAX_LOGPROB_TOKEN_IDS,
    "messages": 4096,
}
MAX_FIELDS = 256


def check_lengths(body: Mapping[str, Any]) -> None:
    """Refuse bodies whose mere size would keep the event loop busy, before they are looked at.

    Raises:
        InvalidRequestError: a list or mapping has too many entries; ``param`` names it.
    """
    if len(body) > MAX_FIELDS:
        raise InvalidRequestError(f"The body has more than {MAX_FIELDS} fields.")
    for name, most in MAX_LENGTHS.items():
        value = body.get(name)
        if isinstance(value, (list, dict)) and len(value) > most:
            raise InvalidRequestError(f"{name} must hold at most {most} entries.", param=name)


class UnknownFields:
    """Logs names of fields that nobody knows, once each."""

    MAX_NAMES = 64

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def notice(self, names: Collection[str], used: Collection[str]) -> None:
        """Warn of those ``names`` that are in no list and were not warned of before."""
        for name in names:
            if name in used or name in NO_EFFECT or name in NOT_SUPPORTED:
                continue
            short = name[:64]
            if short in self._seen or len(self._seen) >= self.MAX_NAMES:
                continue
            self._seen.add(short)
            logger.warning("Requests carry a field that octavo does not know: %r. Ignored.", short)
