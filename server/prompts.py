"""The four forms of a completion's ``prompt``."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from ..engine.api import Prompt, TextPrompt, TokensPrompt
from ..engine.errors import InvalidRequestError
from .schemas import GenerationFields

MAX_PROMPTS = 1024


class Truncation(NamedTuple):
    """What becomes of prompts that are longer than wanted."""

    max_tokens: int | None = None  # None: they stay as they are; -1: room is left for output
    keeps_start: bool = False


AS_IT_IS = Truncation()


def truncation(body: GenerationFields) -> Truncation:
    """What a request says of long prompts; without a side their end is kept."""
    return Truncation(body.truncate_prompt_tokens, body.truncation_side == "right")


def parse_prompts(prompt: Any, *, add_special_tokens: bool) -> list[Prompt]:
    """A string, token ids, or a list of either, as one prompt each.

    Token ids must be integers; whether the model has them is the engine's to say.

    Raises:
        InvalidRequestError: another form, no prompt, an empty one, or more than 1024.
    """
    if prompt is None:
        _refuse("prompt is required.")
    many = _as_list_of_prompts(prompt)
    if len(many) > MAX_PROMPTS:
        _refuse(f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(many)}.")
    return [_parse_one(one, add_special_tokens) for one in many]


def _as_list_of_prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        _refuse("prompt must be a string, token ids, or a list of either.")
    if not prompt:
        _refuse("prompt must not be empty.")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if kinds not in ({str}, {list}):
        _refuse("prompt must hold strings only, token ids only, or lists of token ids only.")
    return prompt


def _parse_one(prompt: str | list[Any], add_special_tokens: bool) -> Prompt:
    if not prompt:
        _refuse("prompt must not be empty.")
    if isinstance(prompt, str):
        return TextPrompt(prompt, add_special_tokens)
    if set(map(type, prompt)) != {int}:
        _refuse("prompt must hold integers where it holds token ids.")
    return TokensPrompt(prompt)


def _refuse(message: str) -> NoReturn:
    raise InvalidRequestError(message, param="prompt")
