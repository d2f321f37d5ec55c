"""The requests that a call of ``LLM`` makes: one for each prompt.

Owns what may stand beside prompts in a call. Must not know who computes a request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ..api import GenerationRequest, PoolingParams, Prompt, SamplingParams
from ..errors import InvalidRequestError, NotSupportedError
from .offline_prompts import PromptLike, as_prompts, cache_salt, engine_prompt

Params = TypeVar("Params", SamplingParams, PoolingParams)


class AskedPrompts(NamedTuple):
    """The prompts of a call, as the engine takes them."""

    prompts: Sequence[Prompt]
    salts: Sequence[str | None]  # of each
    max_prompt_tokens: int | None  # to which they are cut


def asked_prompts(
    prompts: PromptLike | Sequence[PromptLike], tokenization_kwargs: Mapping[str, Any] | None
) -> AskedPrompts:
    """Texts and token ids that are to be continued.

    Raises:
        InvalidRequestError: a prompt or argument is wrong.
    """
    is_special, cut = tokenization(tokenization_kwargs, add_special_tokens=True)
    many = as_prompts(prompts)
    salts = [cache_salt(one) for one in many]
    asked = [engine_prompt(one, add_special_tokens=is_special) for one in many]
    return AskedPrompts(asked, salts, cut)


def generation_requests(
    request_ids: Iterator[int],
    asked: AskedPrompts,
    sampling_params: SamplingParams | Sequence[SamplingParams],
    priority: Sequence[int] | None,
) -> list[GenerationRequest]:
    """Requests that continue prompts.

    Raises:
        InvalidRequestError: parameters or priorities are not one for each, or of another kind.
    """
    prompts, salts, max_prompt_tokens = asked
    priorities = [0] * len(prompts) if priority is None else list(priority)
    if len(priorities) != len(prompts):
        raise InvalidRequestError(
            f"{len(prompts)} prompts and {len(priorities)} priorities.", param="priority"
        )
    params = _for_each("sampling_params", SamplingParams, sampling_params, len(prompts))
    return [
        GenerationRequest(
            str(next(request_ids)),
            prompt,
            sampling,
            time.monotonic(),
            rank,
            salt,
            max_prompt_tokens=max_prompt_tokens,
        )
        for prompt, salt, sampling, rank in zip(prompts, salts, params, priorities, strict=True)
    ]


def embedding_requests(
    request_ids: Iterator[int],
    prompts: PromptLike | Sequence[PromptLike],
    pooling_params: PoolingParams | Sequence[PoolingParams],
    max_prompt_tokens: int | None,
) -> list[GenerationRequest]:
    """Requests that make vectors of prompts.

    Raises:
        InvalidRequestError: a prompt is wrong; parameters are not one for each, or of another kind.
    """
    many = as_prompts(prompts)
    return [
        GenerationRequest(
            str(next(request_ids)),
            engine_prompt(prompt, add_special_tokens=True),
            SamplingParams(max_tokens=0),
            time.monotonic(),
            cache_salt=cache_salt(prompt),
            max_prompt_tokens=max_prompt_tokens,
            pooling=pooling,
        )
        for prompt, pooling in zip(
            many,
            _for_each("pooling_params", PoolingParams, pooling_params, len(many)),
            strict=True,
        )
    ]


def _for_each(
    param: str, kind: type[Params], given: Params | Sequence[Params], num_prompts: int
) -> list[Params]:
    """One for all prompts, or one for each, as one for each."""
    one_each = list(given) if isinstance(given, Sequence) else [given] * num_prompts
    if len(one_each) != num_prompts:
        raise InvalidRequestError(
            f"{num_prompts} prompts and {len(one_each)} {param}.", param=param
        )
    for one in one_each:
        if not isinstance(one, kind):
            raise InvalidRequestError(
                f"{param} must be {kind.__name__}, one or a list of them; got {type(one).__name__}.",
                param=param,
            )
    return one_each


def refuse_given(**given: Any) -> None:
    """
    Raises:
        NotSupportedError: one of these arguments, which are not offered, was given.
    """
    for name, value in given.items():
        if value:
            raise NotSupportedError(f"{name} is not supported.", param=name)


def tokenization(
    kwargs: Mapping[str, Any] | None, *, add_special_tokens: bool
) -> tuple[bool, int | None]:
    """Whether special tokens are added, and to how many tokens a prompt is cut.

    Raises:
        InvalidRequestError: another argument, or a value of another kind.
    """
    left = dict(kwargs or {})
    is_special, cut = (
        left.pop("add_special_tokens", add_special_tokens),
        left.pop("truncate_prompt_tokens", None),
    )
    if left:
        name = next(iter(left))
        raise NotSupportedError(f"{name} is not supported.", param="tokenization_kwargs")
    if not isinstance(is_special, bool):
        raise InvalidRequestError(
            f"add_special_tokens must be true or false, got {is_special!r}.",
            param="tokenization_kwargs",
        )
    if cut is not None and (isinstance(cut, bool) or not isinstance(cut, int)):
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be an integer, got {cut!r}.", param="tokenization_kwargs"
        )
    return is_special, cut
