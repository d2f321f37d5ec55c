"""From request fields to ``SamplingParams``.

A field that is absent or null takes the model's own default (``generation_config.json``) if there is
one, else OpenAI's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..engine.api import SamplingParams
from ..engine.errors import InvalidRequestError
from .reports import Report
from .schemas import GenerationFields

_TRANSLATED = frozenset({"max_tokens", "logprobs", "prompt_logprobs", "logit_bias"})
FIELDS = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in GenerationFields.model_fields and field.name not in _TRANSLATED
)
"""Fields of a request that go into :class:`SamplingParams` as they are, by the same name."""

_DRAWING = ("temperature", "top_p", "top_k", "min_p")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


def sampling_params(
    body: GenerationFields,
    defaults: Mapping[str, Any],
    report: Report,
    *,
    max_tokens: int | None,
) -> SamplingParams:
    """Translate ``body``.

    Args:
        body: The checked request.
        defaults: The model's own, by field name.
        report: What is told of the tokens.
        max_tokens: The route's default; ``None`` is the rest of the window.

    Raises:
        InvalidRequestError: a value is out of range; ``param`` names it.
    """
    if body.use_beam_search:  # which draws nothing
        defaults = {name: value for name, value in defaults.items() if name not in _DRAWING}
    values = {name: defaults[name] for name in FIELDS if defaults.get(name) is not None}
    values |= {name: value for name in FIELDS if (value := getattr(body, name)) is not None}
    looks_at_prompt = report.has_echo or report.num_prompt_top is not None
    limit = _max_tokens(body, least=0 if looks_at_prompt else 1)
    return SamplingParams(
        max_tokens=defaults.get("max_tokens", max_tokens) if limit is None else limit,
        logprobs=report.num_top,
        prompt_logprobs=report.num_scored_top,
        logit_bias=_logit_bias(body.logit_bias),
        **values,
    )


def _max_tokens(body: GenerationFields, *, least: int) -> int | None:
    """What the client asks for. 0 only makes sense with an echoed or scored prompt."""
    for name in ("max_completion_tokens", "max_tokens"):
        value: int | None = getattr(body, name)
        if value is not None:
            if value < least:
                raise InvalidRequestError(
                    f"{name} must be at least {least}, got {value}.", param=name
                )
            return value
    return None


def _logit_bias(bias: Mapping[str, Any] | None) -> dict[int, float] | None:
    if not bias:
        return None
    for key in bias:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequestError(
                f"logit_bias keys must be token ids in plain decimals, got {key[:32]!r}.",
                param="logit_bias",
            )
    return {int(key): value for key, value in bias.items()}
