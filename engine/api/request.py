"""What is asked of the engine: a prompt, and what is wanted of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .pooling_params import PoolingParams
from .sampling_params import SamplingParams

MAX_CACHE_SALT_CHARS = 128


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt to be tokenised."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """A prompt given as token ids; used as it is."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered by the model's chat template.

    Messages hold plain strings in ``role`` and ``content`` (the caller has joined content parts).
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False  # templates write their own


Prompt = TextPrompt | TokensPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class ResumedSequence:
    """What a sequence had produced when the engine that computed it ended."""

    output_token_ids: tuple[int, ...]
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and what is wanted of it."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    arrival_time: float  # time.monotonic() at the door
    priority: int = 0  # lower runs first, where the policy looks at it
    cache_salt: str | None = None  # requests share prefix blocks only within one salt
    tenant: str | None = None  # whose it is; nor do they share them with another tenant's
    weight: float = 1.0  # the tenant's share of the engine, where the policy looks at it
    resume: tuple[ResumedSequence, ...] = ()  # one per child; empty for a fresh request
    max_prompt_tokens: int | None = None  # a longer one is cut; -1: to what leaves room for output
    keeps_prompt_start: bool = False  # of a cut prompt, rather than its end
    echo: bool = False  # the prompt's text is wanted too: outputs have it, and its text offsets
    aligns_tokens: bool = False  # token ids come with their text, as they do with log-probabilities
    pooling: PoolingParams | None = None  # the prompt's embedding is wanted, and no output at all


@dataclass(frozen=True, slots=True)
class RenderedRequest:
    """A request as the engine would compute it."""

    request_id: str
    prompt: str | None  # the text, as given or rendered; None for token ids
    prompt_token_ids: list[int]
    sampling: SamplingParams  # with what was left open filled in, but for the seed
