"""The items of a response's input and output: from what clients send to a conversation, and back.

An item is a message of text; whatever else clients may send (calls, their outputs, references,
reasoning, images) is refused by name. Must not know the store or how answers are generated.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..engine.api import ChatPrompt
from ..engine.errors import InvalidRequestError, NotSupportedError

MAX_ITEMS = 4096
MAX_PARTS = 1024
ROLES = ("user", "assistant", "system", "developer")
_PART_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_ITEM_BYTES = 256  # of an item's own object and its place in a conversation


def new_item_id() -> str:
    """An id for a message."""
    return f"msg_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class Item:
    """One message of a conversation."""

    id: str
    role: str
    parts: tuple[str, ...]
    status: str = "completed"

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return _ITEM_BYTES + sys.getsizeof(self.id) + sum(map(sys.getsizeof, self.parts))

    def as_message(self) -> dict[str, str]:
        """For the chat template: ``developer`` is another name for ``system``."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(self.parts)}

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's object."""
        return message(self.id, self.role, self.status, [self._part(text) for text in self.parts])

    def _part(self, text: str) -> dict[str, Any]:
        return output_part(text, []) if self.role == "assistant" else input_part(text)


def message(
    item_id: str, role: str, status: str, content: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """OpenAI's object for a message of these parts."""
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": role,
        "content": content,
    }


def input_part(text: str) -> dict[str, Any]:
    """A part of what somebody told the model."""
    return {"type": "input_text", "text": text}


def output_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """A part of what a model said."""
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


def parse_input(value: Any) -> tuple[Item, ...]:
    """The items of a request's ``input``: a text is one message of the user.

    Raises:
        InvalidRequestError: it is missing or malformed; ``param`` is the path.
        NotSupportedError: an item or a part is of a kind that octavo does not take.
    """
    if value is None:
        _refuse("input is required.", "input")
    if isinstance(value, str):
        return (Item(new_item_id(), "user", (value,)),)
    if not isinstance(value, list):
        _refuse("input must be a string or a list of items.", "input")
    if not value:
        _refuse("input must not be empty.", "input")
    if len(value) > MAX_ITEMS:
        _refuse(f"input must hold at most {MAX_ITEMS} items, got {len(value)}.", "input")
    return tuple(_item(one, f"input[{i}]") for i, one in enumerate(value))


def _item(item: Any, path: str) -> Item:
    if not isinstance(item, dict):
        _refuse(f"{path} must be an object.", path)
    kind = item.get("type")
    if kind is not None and kind != "message":
        raise NotSupportedError(
            f"{path} is of the type {_shown(kind)}, which is not supported yet: messages are.",
            param=f"{path}.type",
        )
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        _refuse(f"{path}.role must be one of {', '.join(ROLES)}.", f"{path}.role")
    given = item.get("id")
    if given is not None and not isinstance(given, str):
        _refuse(f"{path}.id must be a string.", f"{path}.id")
    return Item(given or new_item_id(), role, _texts(item.get("content"), f"{path}.content"))


def _texts(content: Any, path: str) -> tuple[str, ...]:
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        _refuse(f"{path} must be a string or a list of text parts.", path)
    if len(content) > MAX_PARTS:
        _refuse(f"{path} must hold at most {MAX_PARTS} parts.", path)
    return tuple(_part_text(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _PART_TEXTS:
        raise NotSupportedError(
            f"{path} is of the type {_shown(kind)}: this model takes input_text and output_text.",
            param=f"{path}.type",
        )
    name = _PART_TEXTS[kind]
    text = part.get(name)
    if not isinstance(text, str):
        _refuse(f"{path}.{name} must be a string.", f"{path}.{name}")
    return text


def conversation(
    instructions: str | None, items: Sequence[Item], template_kwargs: Mapping[str, Any] | None
) -> ChatPrompt:
    """``items`` as the model sees them, the instructions before them."""
    messages = [item.as_message() for item in items]
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    return ChatPrompt(messages=messages, template_kwargs=template_kwargs or {})


def _shown(kind: Any) -> str:
    return repr(kind)[:64]


def _refuse(message: str, param: str) -> NoReturn:
    raise InvalidRequestError(message, param=param)
