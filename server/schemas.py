"""What clients send: the fields that octavo uses, with strict types.

Nothing is coerced: true is not 1 and "1" is not 1. Null means "not given" for every field. Ranges are
checked by ``SamplingParams``, which is the one place that knows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from ..engine.errors import InvalidRequestError
from .errors import describe_validation

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Schema = TypeVar("Schema", bound="Wire")


class Wire(BaseModel):
    """Base of every request schema."""

    model_config = ConfigDict(strict=True, extra="ignore")


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _off_as_none(value: Any) -> Any:
    return None if value is False else value


StopStrings = Annotated[
    list[str],
    BeforeValidator(_as_list),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        mode="validation",
    ),
]


def _check_early_stopping(value: Any) -> Any:
    if value is None or isinstance(value, bool) or value == "never":
        return value
    raise PydanticCustomError("early_stopping", 'Input should be true, false or "never"')


EarlyStopping = Annotated[
    Any,
    AfterValidator(_check_early_stopping),
    WithJsonSchema({"enum": [True, False, "never", None]}, mode="validation"),
]


class StreamOptions(Wire):
    """``stream_options`` of a streamed request."""

    include_usage: bool | None = Field(None, description="One more chunk, with the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="The usage so far in every chunk."
    )


class GenerationFields(Wire):
    """Fields that completions and chat completions share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = Field(None, description="Beats max_tokens.")
    min_tokens: Int64 | None = None
    stop: StopStrings | None = None
    stop_token_ids: list[Int64] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, Any] | None = Field(
        None, description="Token id, as a plain decimal, to a number in [-100, 100]."
    )
    allowed_token_ids: list[Int64] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: Int64 | None = Field(
        None,
        description="A longer prompt is cut to so many tokens; -1: to what leaves room for output.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where the cut prompt loses its tokens."
    )
    add_special_tokens: bool | None = None
    n: Int64 | None = Field(None, description="Choices for each prompt.")
    best_of: Int64 | None = Field(
        None, description="Sequences to choose the n best from; with use_beam_search, the width."
    )
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping = None
    prompt_logprobs: Int64 | None = Field(
        None, description="Alternatives for each token of the prompt; 0: only the token's own."
    )
    logprob_token_ids: list[Int64] | None = Field(
        None, description="Alternatives, in place of the most likely ones; needs logprobs."
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Log-probabilities name tokens token_id:N."
    )
    cache_salt: str | None = Field(
        None, description="Cached blocks are shared only within one salt."
    )
    priority: Int64 | None = Field(
        None, description="Lower runs first; needs --scheduling-policy priority."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        """Whether every chunk of a stream says the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationFields):
    """The body of ``POST /v1/completions``."""

    prompt: Annotated[
        Any,
        Field(description="A string, token ids, or a list of strings or of lists of token ids."),
    ] = None
    echo: bool | None = None
    logprobs: Annotated[Int64 | None, BeforeValidator(_off_as_none)] = Field(
        None, description="Alternatives for each token; 0: only the token's own."
    )


class ChatCompletionRequest(GenerationFields):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = Field(
        None, description="The answer begins with the last message, if that is the assistant's."
    )
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = Field(None, description="Alternatives; needs logprobs.")


class TokenizeTextRequest(Wire):
    """The body of ``POST /tokenize`` with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(Wire):
    """The body of ``POST /tokenize`` with a conversation."""

    model: str | None = None
    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[
        Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})
    ] = Field(description="Token ids.")


def parse(schema: type[Schema], body: Mapping[str, Any]) -> Schema:
    """Check ``body`` against ``schema``.

    Raises:
        InvalidRequestError: the first field that is wrong or missing, named.
    """
    try:
        parsed = schema.model_validate(body)
    except ValidationError as error:
        failure = describe_validation(error.errors(include_url=False, include_context=False))
        raise InvalidRequestError(failure.message, param=failure.param) from None
    if isinstance(parsed, GenerationFields) and parsed.stream_options and not parsed.stream:
        raise InvalidRequestError("stream_options needs stream=true.", param="stream_options")
    return parsed


@cache
def body_schema(*schemas: type[Wire]) -> dict[str, Any]:
    """The OpenAPI description of a route whose body is one of ``schemas``."""
    shapes = [schema.model_json_schema() for schema in schemas]
    content = {"application/json": {"schema": shapes[0] if len(shapes) == 1 else {"anyOf": shapes}}}
    return {"requestBody": {"required": True, "content": content}}
