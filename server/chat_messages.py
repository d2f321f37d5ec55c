"""The messages of a chat, as plain strings that any chat template can print.

The rules: text parts are joined without a separator. ``developer`` is another name for ``system``.
``content`` may be null or absent only in an assistant's message with tool calls; past tool calls are
appended to its text, each as ``<tool_call>`` JSON ``</tool_call>``, so that no template can drop
them. Parts other than text are refused; nothing is ever fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ..engine.api import ChatPrompt
from ..engine.errors import InvalidRequestError
from .schemas import ChatCompletionRequest, TokenizeChatRequest

MAX_PARTS = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")


def chat_prompt(body: ChatCompletionRequest | TokenizeChatRequest) -> ChatPrompt:
    """The conversation of a request.

    Raises:
        InvalidRequestError: a message is malformed; ``param`` is its path.
    """
    if not body.messages:
        _refuse("messages must not be empty.", "messages")
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        _refuse(
            "continue_final_message and add_generation_prompt exclude each other.",
            "continue_final_message",
        )
    generates = body.add_generation_prompt
    return ChatPrompt(
        messages=[_message(m, f"messages[{i}]") for i, m in enumerate(body.messages)],
        add_generation_prompt=not continues if generates is None else generates,
        continue_final_message=continues,
        template_kwargs=body.chat_template_kwargs or {},
        add_special_tokens=bool(body.add_special_tokens),
    )


def _message(message: Mapping[str, Any], path: str) -> dict[str, str]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        _refuse(f"{path}.role must be one of {', '.join(ROLES)}.", f"{path}.role")
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        _refuse(f"{path}.tool_calls needs the role assistant.", f"{path}.tool_calls")
    text = _tool_calls_text(calls, f"{path}.tool_calls") if calls else ""
    if message.get("content") is not None:
        text = _text(message["content"], f"{path}.content") + text
    elif not calls:
        _refuse(f"{path}.content is required.", f"{path}.content")
    plain = {"role": "system" if role == "developer" else role, "content": text}
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            plain[key] = _string(message[key], f"{path}.{key}")
    return plain


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(f"{path} must be a string or a list of text parts.", path)
    if len(content) > MAX_PARTS:
        _refuse(f"{path} must hold at most {MAX_PARTS} parts.", path)
    return "".join(_part_text(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        _refuse(f"{path} must be a text part: this model takes text only.", path)
    return _string(part.get(kind), f"{path}.{kind}")


def _tool_calls_text(calls: Any, path: str) -> str:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        _refuse(f"{path} must be a list.", path)
    return "".join(_tool_call_text(call, f"{path}[{i}]") for i, call in enumerate(calls))


def _tool_call_text(call: Any, path: str) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        _refuse(f"{path}.function is required.", f"{path}.function")
    name = _string(function.get("name"), f"{path}.function.name")
    arguments = _string(function.get("arguments", "{}"), f"{path}.function.arguments")
    quoted = json.dumps(name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {quoted}, "arguments": {arguments}}}\n</tool_call>'


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        _refuse(f"{path} must be a string.", path)
    return value


def _refuse(message: str, param: str) -> NoReturn:
    raise InvalidRequestError(message, param=param)
