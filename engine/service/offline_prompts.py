"""The forms in which scripts give prompts and conversations to ``LLM``.

Owns what they may hold; makes the engine's prompts of them. Must not know what becomes of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from ..api import ChatPrompt, Prompt
from ..api import TextPrompt as EngineTextPrompt
from ..api import TokensPrompt as EngineTokensPrompt
from ..errors import InvalidRequestError, NotSupportedError


class TextPrompt(TypedDict):
    """A text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids, and what text they are of, if anybody wants to know."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptLike = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, with ``"cache_salt"``
where only prompts of the same salt may share cached blocks."""
Message = Mapping[str, Any]

_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or many as a list. A list of integers is one prompt.

    Raises:
        InvalidRequestError: it is neither.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise _wrong(f"Prompts must be a list, got {type(prompts).__name__}.")
    if prompts and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def engine_prompt(prompt: Any, *, add_special_tokens: bool = True) -> Prompt:
    """The engine's form of a prompt.

    Raises:
        InvalidRequestError: it is none of :data:`PromptLike`.
        NotSupportedError: it has a part that octavo does not take.
    """
    if isinstance(prompt, str):
        return EngineTextPrompt(prompt, add_special_tokens)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt, add_special_tokens)
    if isinstance(prompt, Sequence):
        return _from_ids(prompt)
    kind = type(prompt).__name__
    raise _wrong(f"A prompt must be a string, token ids or a dictionary, got {kind}.")


def _from_mapping(prompt: Mapping[str, Any], add_special_tokens: bool) -> Prompt:
    for name, value in prompt.items():
        if name not in _KEYS and value is not None:
            raise NotSupportedError(f"A prompt's {name!r} is not supported.", param="prompts")
    if prompt.get("prompt_token_ids") is not None:
        return _from_ids(prompt["prompt_token_ids"])
    if isinstance(prompt.get("prompt"), str):
        return EngineTextPrompt(prompt["prompt"], add_special_tokens)
    raise _wrong("A prompt needs 'prompt' or 'prompt_token_ids'.")


def _from_ids(token_ids: Any) -> Prompt:
    ids: list[Any] = list(token_ids) if isinstance(token_ids, Sequence) else [None]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise _wrong(f"Token ids must be integers, got {token_ids!r:.80}.")
    return EngineTokensPrompt(ids)


def cache_salt(prompt: Any) -> str | None:
    """What a prompt says of who may share its blocks.

    Raises:
        InvalidRequestError: it is no text.
    """
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and not isinstance(salt, str):
        raise InvalidRequestError(f"cache_salt must be a text, got {salt!r}.", param="cache_salt")
    return salt


def as_conversations(messages: Any) -> list[Any]:
    """One conversation or many as a list.

    Raises:
        InvalidRequestError: it is neither.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise _wrong(f"messages must be a list, got {type(messages).__name__}.", "messages")
    is_one = not messages or isinstance(messages[0], Mapping)
    return [messages] if is_one else list(messages)


def chat_prompt(conversation: Any, **options: Any) -> ChatPrompt:
    """The engine's form of a conversation. Parts of a content are joined without a separator.

    Raises:
        InvalidRequestError: a message is no mapping, or has a part other than text.
    """
    if not isinstance(conversation, Sequence) or isinstance(conversation, str):
        raise _wrong("A conversation must be a list of messages.", "messages")
    return ChatPrompt([_message(one) for one in conversation], **options)


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(f"A message must be a dictionary, got {type(message).__name__}.", "messages")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence):
        raise _wrong("A message's content must be a text or a list of text parts.", "messages")
    return {**message, "content": "".join(map(_part_text, content))}


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise _wrong(
            "A part of a message's content must be text: this model takes text only.", "messages"
        )
    return text


def _wrong(message: str, param: str = "prompts") -> InvalidRequestError:
    return InvalidRequestError(message, param=param)
