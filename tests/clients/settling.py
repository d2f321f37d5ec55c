"""Hook of schemathesis: three of four generated bodies are brought to what one model accepts at once.

A body from the schema alone nearly always breaks a rule that no schema can say: fields that exclude each other, a
window of 64 tokens, a vocabulary of 320. Such a one is refused before the engine sees it. What is
settled here comes through, and reaches the engine in every combination of fields; the others stay as they are.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import hypothesis
import schemathesis

VOCAB_SIZE = 320  # of the model in tiny_model.py
MAX_CHARS, MAX_ITEMS, MAX_NEW, MAX_CHOICES = 16, 3, 6, 3
TOKEN_LISTS = ("prompt", "tokens", "input", "stop_token_ids", "allowed_token_ids")
NOT_FOR_BEAMS = ("stop", "logprobs", "prompt_logprobs", "temperature", "top_p", "top_k", "min_p")
COUNTS = {
    "n": (1, MAX_CHOICES),
    "best_of": (1, MAX_CHOICES),
    "max_tokens": (1, MAX_NEW),
    "max_completion_tokens": (1, MAX_NEW),
    "max_output_tokens": (1, MAX_NEW),
    "min_tokens": (0, 1),
    "logprobs": (0, 20),
    "top_logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "truncate_prompt_tokens": (1, 32),
}


def _no_target(observation: float, *, label: str = "") -> float:
    return observation


# Else hypothesis computes for minutes how to raise schemathesis' share of accepted requests, and sends few.
setattr(hypothesis, "target", _no_target)  # noqa: B010  (mypy refuses the plain assignment)


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """``body``, settled or as it is; which is a function of the body."""
    if not isinstance(body, dict) or not _checksum(body) % 4:
        return body
    return settled(body)


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, default=repr).encode(errors="replace"))


def settled(body: dict[str, Any]) -> dict[str, Any]:
    """What is out of range is brought into it; of fields that exclude each other one goes."""
    calm = {name: _within(name, value) for name, value in body.items() if name != "model"}
    if calm.get("use_beam_search") is True:
        for name in (*NOT_FOR_BEAMS, "top_logprobs", "stream"):
            calm.pop(name, None)
    _settle_reports(calm)
    if calm.get("stream") is not True:
        calm.pop("stream_options", None)
    if calm.get("add_generation_prompt") is True:
        calm.pop("continue_final_message", None)
    return calm


def _settle_reports(calm: dict[str, Any]) -> None:
    n, best_of = calm.get("n") or 1, calm.get("best_of") or 0
    if isinstance(best_of, int) and isinstance(n, int) and best_of:
        calm["best_of"] = max(n, best_of)
        if best_of > n:
            calm.pop("stream", None)
    if calm.get("stream") is True:
        calm.pop("prompt_logprobs", None)
    if calm.get("top_logprobs"):
        calm["logprobs"] = True


def _within(name: str, value: Any) -> Any:
    if name in COUNTS and isinstance(value, int) and not isinstance(value, bool):
        least, most = COUNTS[name]
        return least + value % (most - least + 1)
    if name in TOKEN_LISTS:
        return _ids_in_vocabulary(value)
    if name == "logit_bias" and isinstance(value, dict):
        return {
            str(zlib.crc32(key.encode(errors="replace")) % VOCAB_SIZE): bias
            for key, bias in value.items()
        }
    if name == "messages" and isinstance(value, list):
        return [_short(message) for message in value[:MAX_ITEMS]]
    return value


def _ids_in_vocabulary(value: Any) -> Any:
    if isinstance(value, list):
        return [_ids_in_vocabulary(one) for one in value[:MAX_ITEMS]]
    if isinstance(value, int) and not isinstance(value, bool):
        return value % VOCAB_SIZE
    return value[:MAX_CHARS] if isinstance(value, str) else value


def _short(message: Any) -> Any:
    """A message without fields of its own making, its texts cut."""
    if not isinstance(message, dict):
        return message
    if isinstance(message.get("content"), str):
        return {**message, "content": message["content"][:MAX_CHARS]}
    return message


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Every other name of a model is the one that is served."""
    if isinstance(path_parameters, dict) and _checksum(path_parameters) % 2:
        return {
            name: "tiny" if name == "model_id" else one for name, one in path_parameters.items()
        }
    return path_parameters
