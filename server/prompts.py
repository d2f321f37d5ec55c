"""The four forms of a completion's ``prompt``."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from ..engine.api import Prompt, TextPrompt, TokensPrompt
from ..engine.errors import InvalidRequestError

MAX_PROMPTS = 1024


class Truncation(NamedTuple):
    """What becomes of prompts that are longer than wanted."""

    max_tokens: int | None = None  # None: they stay as they are; -1: room is left for output
    keeps_start: bool = False


AS_IT_IS = Truncation()


def truncation(max_tokens: int | None, side: str | None) -> Truncation:
    """What a request says of long prompts; without a side their end is kept."""
    return Truncation(max_tokens, side == "right")


def parse_prompts(
    prompt: Any, *, add_special_tokens: bool, name: str = "prompt", most: int = MAX_PROMPTS
) -> list[Prompt]:
    """A string, token ids, or a list of either, as one prompt each.

    Token ids must be integers; whether the model has them is the engine's to say.

    Args:
        name: Of the field.
        most: Prompts that it may hold.

    Raises:
        InvalidRequestError: another form, no prompt, an empty one, or too many.
    """
    if prompt is None:
        _refuse(name, "is required")
    many = _as_list_of_prompts(name, prompt)
    if len(many) > most:
        _refuse(name, f"must hold at most {most} prompts, got {len(many)}")
    return [_parse_one(name, one, add_special_tokens) for one in many]


def _as_list_of_prompts(name: str, prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        _refuse(name, "must be a string, token ids, or a list of either")
    if not prompt:
        _refuse(name, "must not be empty")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if kinds not in ({str}, {list}):
        _refuse(name, "must hold strings only, token ids only, or lists of token ids only")
    return prompt


def _parse_one(name: str, prompt: str | list[Any], add_special_tokens: bool) -> Prompt:
    if not prompt:
        _refuse(name, "must not be empty")
    if isinstance(prompt, str):
        return TextPrompt(prompt, add_special_tokens)
    if set(map(type, prompt)) != {int}:
        _refuse(name, "must hold integers where it holds token ids")
    return TokensPrompt(prompt)


def _refuse(name: str, why: str) -> NoReturn:
    raise InvalidRequestError(f"{name} {why}.", param=name)
