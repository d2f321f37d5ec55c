"""What ``POST /v1/responses`` takes: fields, their types, and which of them are refused by name.

The sampling fields are those of the other generation routes. What a response has no use for, ``n`` or
``logprobs``, say, is refused there, unless it has the value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ..engine.errors import InvalidRequestError, NotSupportedError
from .fields import check_lengths, check_supported, is_neutral
from .reports import Report, num_alternatives
from .sampling import FIELDS
from .schemas import GenerationFields, Int64, StreamOptions, Wire, parse

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(  # the others are parts of items that never occur here
    {
        LOGPROBS,
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
        "reasoning.encrypted_content",
    }
)
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512

_NOT_TAKEN: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": (),
    "add_special_tokens": (False,),
    "return_token_ids": (False,),
    "echo": (False,),
    "logprobs": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "messages": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "prompt": (),
    "conversation": (),
    "context_management": ([],),
    "moderation": (),
    "background_options": ({}, {"completion_window": "soonest"}),
    "structured_outputs": (),
    "response_format": (),
    "previous_input_messages": ([],),
    "enable_response_messages": (False,),
}
_TAKEN = frozenset(FIELDS) - _NOT_TAKEN.keys() | {  # of the fields that generation routes share
    "model",
    "logit_bias",
    "return_tokens_as_token_ids",
    "cache_salt",
    "priority",
    "stream",
    "stream_options",
}
_HINTS = {
    "max_tokens": "max_output_tokens is its name here",
    "max_completion_tokens": "max_output_tokens is its name here",
    "messages": "input is its name here",
    "logprobs": f'include: ["{LOGPROBS}"] and top_logprobs ask for it here',
    "response_format": "text.format is its name here",
    "truncate_prompt_tokens": "truncation is its name here",
    "conversation": "previous_response_id continues a response",
    "prompt": "send input and instructions",
}
_WITHOUT_EFFECT = frozenset({"access_programs", "image", "prompt_cache_options"})


class ResponsesStreamOptions(StreamOptions):
    """``stream_options`` of a streamed response; its usage is always told."""

    include_obfuscation: Literal[False] | None = None


class TextFormat(Wire):
    """``text.format``."""

    type: str | None = None


class TextConfig(Wire):
    """``text``."""

    format: TextFormat | None = None
    verbosity: str | None = None


def _describe_taken(schema: dict[str, Any]) -> None:
    """Leave what is refused out of the OpenAPI document."""
    for name in GenerationFields.model_fields.keys() - _TAKEN:
        schema["properties"].pop(name, None)


class ResponsesRequest(GenerationFields):
    """The body of ``POST /v1/responses``."""

    model_config = ConfigDict(json_schema_extra=_describe_taken)

    input: Annotated[
        Any,
        Field(description="A text, or messages: their content is a text or a list of text parts."),
    ] = None
    instructions: str | None = Field(
        None, description="A system message before the conversation; the next response has its own."
    )
    previous_response_id: str | None = Field(
        None, description="A stored response whose conversation this one continues."
    )
    max_output_tokens: Int64 | None = Field(None, description="At least 1; absent: as many as fit.")
    include: list[str] | None = Field(None, description=f"{LOGPROBS} asks for log-probabilities.")
    top_logprobs: Int64 | None = Field(
        None, description=f"Alternatives for each token; needs {LOGPROBS} in include."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: the oldest turns of a conversation that is too long are dropped."
    )
    background: bool | None = Field(
        None, description="Answer at once and generate; the response is retrieved by its id."
    )
    store: bool | None = Field(None, description="Absent: true.")
    text: TextConfig | None = None
    metadata: dict[str, str] | None = Field(None, description="At most 16 pairs; told back.")
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int64 | None = None
    service_tier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ResponsesStreamOptions | None = None


KNOWN = frozenset(ResponsesRequest.model_fields) | _NOT_TAKEN.keys() | _WITHOUT_EFFECT
"""Names of fields that need no warning."""


def parse_request(raw: Mapping[str, Any]) -> ResponsesRequest:
    """The checked body.

    Raises:
        InvalidRequestError: a field is wrong; ``param`` is its path.
        NotSupportedError: a field is known and not offered here.
    """
    check_lengths(raw)
    _check_taken(raw)
    check_supported({name: value for name, value in raw.items() if name not in KNOWN})
    body = parse(ResponsesRequest, raw)
    _check_text(body.text)
    check_include(body.include or ())
    _check_metadata(body.metadata or {})
    if body.background and body.store is False:
        raise InvalidRequestError("background needs store=true.", param="background")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise InvalidRequestError(
            f"max_output_tokens must be at least 1, got {body.max_output_tokens}.",
            param="max_output_tokens",
        )
    return body


def _check_taken(raw: Mapping[str, Any]) -> None:
    """Refuse what other generation routes take, or other servers here, and this route does not."""
    shared = GenerationFields.model_fields.keys() - _TAKEN
    for name, value in raw.items():
        if name not in shared and name not in _NOT_TAKEN:
            continue
        if not is_neutral(value, _NOT_TAKEN.get(name, ())):
            hint = _HINTS.get(name)
            reason = f": {hint}" if hint else " by /v1/responses"
            raise NotSupportedError(f"{name} is not supported{reason}.", param=name)


def _check_text(text: TextConfig | None) -> None:
    if text is None:
        return
    kind = text.format.type if text.format else None
    if kind not in (None, "text"):
        raise NotSupportedError(
            f"text.format of the type {kind[:32]!r} is not supported yet: only 'text' is.",
            param="text.format",
        )
    if text.verbosity not in (None, "medium"):
        raise NotSupportedError("text.verbosity is not supported.", param="text.verbosity")


def check_include(names: Sequence[str]) -> None:
    """
    Raises:
        InvalidRequestError: a name is not one of OpenAI's.
    """
    for i, name in enumerate(names):
        if name not in INCLUDABLE:
            raise InvalidRequestError(
                f"include[{i}] must be one of {', '.join(sorted(INCLUDABLE))}; got {name[:64]!r}.",
                param=f"include[{i}]",
            )


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError(
            f"metadata must hold at most {MAX_METADATA} pairs.", param="metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_CHARS:
            raise InvalidRequestError(
                f"metadata must have keys of at most {MAX_METADATA_KEY_CHARS} characters and values "
                f"of at most {MAX_METADATA_CHARS}.",
                param="metadata",
            )


def response_report(body: ResponsesRequest, max_logprobs: int) -> Report:
    """What is told of the tokens.

    Args:
        body: The checked request.
        max_logprobs: Alternatives that may be asked for; -1: any number.

    Raises:
        InvalidRequestError: too many alternatives, or no log-probabilities to have them with.
    """
    is_wanted = LOGPROBS in (body.include or ())
    num_top = num_alternatives(
        body.top_logprobs, max_logprobs, is_wanted, f'include: ["{LOGPROBS}"]'
    )
    return Report(num_top, names_ids=bool(body.return_tokens_as_token_ids))
