"""What the OpenAPI document says of request bodies: the shapes of open fields, and every field's range.

Whoever generates requests from the document, a form or a fuzzer, then stays mostly within what is
accepted. The ranges themselves are checked elsewhere (``SamplingParams``, ``prompts``,
``chat_messages``); a test holds them against :data:`RANGES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine.api import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from .chat_messages import MAX_PARTS, ROLES
from .fields import MAX_LENGTHS
from .prompts import MAX_PROMPTS

_TOKEN_ID = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string", "minLength": 1}
_TOKEN_IDS = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_SAID = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": [*ROLES]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": _PART, "maxItems": MAX_PARTS},
            ]
        },
        "name": {"type": ["string", "null"]},
        "tool_call_id": {"type": ["string", "null"]},
    },
}
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
        },
    },
}
_CALLED = {
    "type": "object",
    "required": ["role", "tool_calls"],
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "tool_calls": {"type": "array", "items": _CALL, "minItems": 1},
    },
}

RANGES: dict[str, dict[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "length_penalty": {"minimum": -50, "maximum": 50},
    "n": {"minimum": 1, "maximum": MAX_N},
    "best_of": {"minimum": 1, "maximum": MAX_N},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 0},
    "min_tokens": {"minimum": 0},
    "logprobs": {"minimum": -1},
    "top_logprobs": {"minimum": -1},
    "prompt_logprobs": {"minimum": -1},
    "truncate_prompt_tokens": {"minimum": -1},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
    "allowed_token_ids": {"minItems": 1, "maxItems": MAX_ALLOWED_TOKEN_IDS},
    "bad_words": {
        "maxItems": MAX_BAD_WORDS,
        "items": {"type": "string", "pattern": r"\S", "maxLength": MAX_BAD_WORD_CHARS},
    },
    "cache_salt": {"minLength": 1, "maxLength": MAX_CACHE_SALT_CHARS, "pattern": r"^[^@/\\\x00]*$"},
    "logit_bias": {
        "maxProperties": MAX_LOGIT_BIAS,
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "messages": {
        "minItems": 1,
        "maxItems": MAX_LENGTHS["messages"],
        "items": {"anyOf": [_SAID, _CALLED]},
    },
}
"""Added to the field's own keywords, to those of its alternative that is no null."""

_STOP = {
    "anyOf": [
        _STOP_STRING,
        {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS},
        {"type": "null"},
    ]
}
_PROMPT = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


def describe_body(schema: Mapping[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with shapes and ranges.

    Args:
        schema: A JSON schema, or several in ``anyOf``; definitions of their own are under ``$defs``.
        components: The document's, to which the definitions move: a reference is resolved in the
            document as a whole.
    """
    for name, definition in schema.get("$defs", {}).items():
        components[name] = describe_body(definition, components)
    described = {name: _moved(value) for name, value in schema.items() if name != "$defs"}
    if "anyOf" in schema:
        described["anyOf"] = [describe_body(one, components) for one in schema["anyOf"]]
    if "properties" in schema:
        fields = described["properties"].items()
        described["properties"] = {name: _describe_field(name, field) for name, field in fields}
        if _is_open_prompt("prompt", schema["properties"].get("prompt", {"type": "none"})):
            described["required"] = ["prompt", *schema.get("required", [])]
    return described


def _moved(value: Any) -> Any:
    """``value`` with its references leading to the document's components."""
    if isinstance(value, str):
        return value.replace("#/$defs/", "#/components/schemas/", 1)
    if isinstance(value, list):
        return [_moved(one) for one in value]
    if isinstance(value, dict):
        return {name: _moved(one) for name, one in value.items()}
    return value


def _is_open_prompt(name: str, field: Mapping[str, Any]) -> bool:
    """Whether this is a completion's prompt; other routes take a text only."""
    return name == "prompt" and "type" not in field


def _describe_field(name: str, field: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: field[key] for key in ("title", "description", "default") if key in field}
    if _is_open_prompt(name, field):
        return {**kept, **_PROMPT}
    if name == "stop":
        return {**kept, **_STOP}
    extra = RANGES.get(name, {})
    if "anyOf" in field:
        return {**field, "anyOf": [_narrowed(one, extra) for one in field["anyOf"]]}
    return _narrowed(field, extra)


def _narrowed(shape: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """``shape`` with ``extra``, unless it is a shape that has no range."""
    if shape.get("type") in ("boolean", "null", None):
        return {**shape}
    kept = dict(shape)
    if "exclusiveMinimum" in extra:
        kept.pop("minimum", None)
    return {**kept, **extra}
