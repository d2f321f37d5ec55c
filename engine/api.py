"""The one interface that callers of the engine see: requests in, outputs back.

Owns the types that cross between the server (or a script) and the engine. Standard library only, so
that they work on a bare machine. Must not know what is behind the interface: no tokens tables,
blocks, sequences or tensors.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, Self

from .errors import InvalidRequestError

if TYPE_CHECKING:
    from .stats import EngineStats, StatsSink

MAX_N = 16384
MAX_STOP_STRINGS = 4
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BEAM_STOP_TOKEN_IDS = 64
"""Each beam looks at that many tokens more, in every step."""
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 18
MAX_BAD_WORDS = 128
"""Also of the ways in which a request's bad words can be written as tokens."""
MAX_BAD_WORD_CHARS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_CACHE_SALT_CHARS = 128
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this select the most likely token."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end id, a stop id or a stop string came."""
    LENGTH = "length"
    """``max_tokens`` or the model's window was reached."""
    ABORT = "abort"
    """The client went away or the server is shutting down."""
    ERROR = "error"
    """The row's logits were not finite; nothing sensible can follow."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Names, defaults and ranges are the ecosystem's. ``None`` means "not given": a default of the
    model's ``generation_config.json`` may fill it (see :meth:`with_defaults`), else the neutral value
    named below applies.

    Raises:
        InvalidRequestError: a value is out of its range; ``param`` names it.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0  # [-2, 2], subtracted once from every token already generated
    frequency_penalty: float = 0.0  # [-2, 2], subtracted once per occurrence in the output
    repetition_penalty: float = 1.0  # > 0, over prompt and output: divides positive logits
    temperature: float = 1.0  # [0, 2]; 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # [0, 1], relative to the most likely token
    seed: int | None = None  # int64; None or -1: drawn at admission
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as fit; 0: only look at the prompt
    min_tokens: int = 0
    logprobs: int | None = None  # alternatives; 0: only the drawn token's; -1: the whole vocabulary
    prompt_logprobs: int | None = None  # likewise of the prompt's tokens but the first
    logprob_token_ids: tuple[int, ...] = ()  # alternatives, in place of the most likely ones
    logit_bias: Mapping[int, float] | None = None  # token id -> [-100, 100]
    allowed_token_ids: tuple[int, ...] | None = None  # no other token is chosen
    bad_words: tuple[str, ...] = ()  # their last token is not chosen after the others
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # the same as tokens; filled at the door
    detokenize: bool = True
    skip_special_tokens: bool = True
    use_beam_search: bool = False  # beam search of width best_of or n; the n best come back
    length_penalty: float = 1.0  # a hypothesis scores cumulative logprob / length ** length_penalty
    early_stopping: bool | str = False  # True: end with as many hypotheses as beams; or "never"

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("stop", "stop_token_ids", "bad_words", "logprob_token_ids"):
            value: Any = getattr(self, name)
            put(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.top_k == -1:
            put(self, "top_k", 0)
        if self.seed == -1:
            put(self, "seed", None)
        if self.logprob_token_ids and self.logprobs is None:
            put(self, "logprobs", 0)
        self._check_numbers()
        self._check_lengths()
        self._check_stops()
        self._check_logit_bias()
        self._check_masks()
        self._check_beams()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def is_best_of(self) -> bool:
        """Whether more sequences are sampled than come back."""
        return not self.use_beam_search and self.num_sequences > self.n

    @property
    def needs_logprobs(self) -> bool:
        """Whether the log-probability of each sampled token is computed."""
        return self.logprobs is not None or self.is_best_of

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine computes for this request."""
        return max(self.n, self.best_of or 0)

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def with_changes(self, **changes: Any) -> Self:
        """A copy with other values, checked again."""
        return replace(self, **changes)

    def _check_numbers(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_finite("top_p", self.top_p)
        if not 0.0 < self.top_p <= 1.0:
            _refuse("top_p", f"top_p must be in (0, 1], got {self.top_p}.")
        _check_finite("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0.0:
            got = self.repetition_penalty
            _refuse(
                "repetition_penalty", f"repetition_penalty must be greater than zero, got {got}."
            )
        _check_int("top_k", self.top_k)
        if self.top_k < 0:
            _refuse("top_k", f"top_k must be 0 or -1 (off), or at least 1, got {self.top_k}.")
        if self.seed is not None:
            _check_int("seed", self.seed)
            if not -(2**63) <= self.seed < 2**63:
                _refuse("seed", f"seed must fit in 64 bits, got {self.seed}.")

    def _check_lengths(self) -> None:
        for name, least, most in (
            ("n", 1, MAX_N),
            ("best_of", 1, MAX_N),
            ("max_tokens", 0, None),
            ("min_tokens", 0, None),
            ("logprobs", -1, None),
            ("prompt_logprobs", -1, None),
        ):
            value = getattr(self, name)
            if value is None and name in ("best_of", "max_tokens", "logprobs", "prompt_logprobs"):
                continue
            _check_int(name, value)
            if value < least:
                _refuse(name, f"{name} must be at least {least}, got {value}.")
            if most is not None and value > most:
                _refuse(name, f"{name} must be at most {most}, got {value}.")
        if self.best_of is not None and self.best_of < self.n:
            _refuse("best_of", f"best_of must be at least n={self.n}, got {self.best_of}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit, got = self.max_tokens, self.min_tokens
            _refuse("min_tokens", f"min_tokens must be at most max_tokens={limit}, got {got}.")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            got = len(self.stop)
            _refuse("stop", f"stop must hold at most {MAX_STOP_STRINGS} strings, got {got}.")
        texts: tuple[Any, ...] = self.stop
        for text in texts:
            if not isinstance(text, str):
                _refuse("stop", f"stop must be a string or a list of strings, got {text!r}.")
            if not text:
                _refuse("stop", "stop cannot contain an empty string.")
            if len(text) > MAX_STOP_STRING_CHARS:
                limit = MAX_STOP_STRING_CHARS
                _refuse("stop", f"a stop string must be at most {limit} characters long.")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            _refuse("stop_token_ids", f"stop_token_ids must hold at most {MAX_STOP_TOKEN_IDS} ids.")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id)
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            limit = MAX_LOGPROB_TOKEN_IDS
            _refuse("logprob_token_ids", f"logprob_token_ids must hold at most {limit} ids.")
        for token_id in self.logprob_token_ids:
            _check_int("logprob_token_ids", token_id)
        if self.stop and not self.detokenize:
            _refuse("stop", "stop strings need detokenize=True.")

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            _refuse("logit_bias", f"logit_bias must hold at most {MAX_LOGIT_BIAS} tokens.")
        checked: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            _check_int("logit_bias", key)
            _check_range("logit_bias", value, -100.0, 100.0)
            checked[key] = float(value)
        object.__setattr__(self, "logit_bias", checked or None)

    def _check_masks(self) -> None:
        allowed = self.allowed_token_ids
        if allowed is not None:
            if not 0 < len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
                limit = MAX_ALLOWED_TOKEN_IDS
                _refuse("allowed_token_ids", f"allowed_token_ids must hold 1 to {limit} ids.")
            for token_id in allowed:
                _check_int("allowed_token_ids", token_id)
        if len(self.bad_words) > MAX_BAD_WORDS:
            _refuse("bad_words", f"bad_words must hold at most {MAX_BAD_WORDS} words.")
        words: tuple[Any, ...] = self.bad_words
        for word in words:
            if not isinstance(word, str) or not word.strip():
                _refuse("bad_words", f"bad_words must hold texts that are not blank, got {word!r}.")
            if len(word) > MAX_BAD_WORD_CHARS:
                limit = MAX_BAD_WORD_CHARS
                _refuse("bad_words", f"a bad word must be at most {limit} characters long.")

    @property
    def has_masks(self) -> bool:
        """Whether some tokens are never chosen."""
        return self.allowed_token_ids is not None or bool(self.bad_word_ids)

    def _check_beams(self) -> None:
        _check_range("length_penalty", self.length_penalty, -50.0, 50.0)
        got = self.early_stopping
        if not isinstance(got, bool) and got != "never":
            _refuse(
                "early_stopping", f'early_stopping must be true, false or "never", got {got!r}.'
            )
        if not self.use_beam_search:
            return
        if self.stop:
            _refuse("stop", "stop strings cannot end a beam; use stop_token_ids.")
        if len(self.stop_token_ids) > MAX_BEAM_STOP_TOKEN_IDS:
            limit = MAX_BEAM_STOP_TOKEN_IDS
            _refuse("stop_token_ids", f"stop_token_ids must hold at most {limit} ids with beams.")
        if self.prompt_logprobs is not None:
            _refuse("prompt_logprobs", "prompt_logprobs cannot be had from a beam search.")
        if self.max_tokens == 0:
            _refuse("max_tokens", "max_tokens must be at least 1 in a beam search.")
        for name, neutral in (
            ("temperature", (0.0, 1.0)),
            ("top_p", (1.0,)),
            ("top_k", (0,)),
            ("min_p", (0.0,)),
        ):
            if getattr(self, name) not in neutral:
                _refuse(name, f"{name} has no meaning in a beam search, which draws nothing.")


POOLING_TYPES = ("last", "mean")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a prompt becomes one vector, its embedding: of the model's last hidden states.

    Raises:
        InvalidRequestError: a value is out of its range; ``param`` names it.
    """

    pooling_type: str | None = None  # "last": the last token's; "mean": of all; None: the engine's
    dimensions: int | None = None  # only the first so many numbers; None: all of them
    normalize: bool = True  # to length 1, after the cut

    def __post_init__(self) -> None:
        if self.pooling_type not in (None, *POOLING_TYPES):
            got = self.pooling_type
            _refuse("pooling_type", f'pooling_type must be "last" or "mean", got {got!r}.')
        if self.dimensions is not None:
            _check_int("dimensions", self.dimensions)
            if self.dimensions < 1:
                _refuse("dimensions", f"dimensions must be at least 1, got {self.dimensions}.")
        normalize: Any = self.normalize
        if not isinstance(normalize, bool):
            _refuse("normalize", f"normalize must be true or false, got {normalize!r}.")


_MAX_FLOAT = sys.float_info.max


def _refuse(param: str, message: str) -> None:
    raise InvalidRequestError(message, param=param)


def _check_int(param: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(param, f"{param} must be an integer, got {value!r}.")


def _check_finite(param: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not -_MAX_FLOAT <= value <= _MAX_FLOAT:
        _refuse(param, f"{param} must be a finite number, got {value!r}.")


def _check_range(param: str, value: Any, least: float, most: float) -> None:
    _check_finite(param, value)
    if not least <= value <= most:
        _refuse(param, f"{param} must be in [{least:g}, {most:g}], got {value}.")


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


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural-log probability under the model, before any sampling filter."""

    logprob: float
    rank: int | None = None  # 1 is the most likely
    decoded_token: str | None = None  # U+FFFD where its bytes are no whole characters
    token_bytes: bytes = b""


@dataclass(slots=True)
class CompletionOutput:
    """One sequence's text: a delta when streamed, everything so far otherwise.

    Where log-probabilities (or aligned tokens) are asked for, a token comes with the last of its text:
    it waits while its bytes are no whole characters, or may belong to a stop string.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or stop string that ended it
    text_offsets: list[int] | None = None  # of aligned tokens: where each one's text begins
    num_cut_tokens: int = 0  # the last ones, which lie in a stop string that was cut off

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def lora_request(self) -> None:
        """Adapters are not served; scripts look here all the same."""


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, seconds of ``time.monotonic()``; ``None`` until they happened."""

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced. In a stream, ``outputs`` hold what is new since the last one."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    num_discarded_tokens: int = 0  # generated for sequences that best_of does not return
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the first token has none
    prompt_text_offsets: list[int] | None = None  # where each prompt token's text begins, with echo
    first_prompt_token: bytes = b""  # which has no log-probability to name it; with echo
    metrics: RequestMetrics | None = None
    error: str | None = None  # why an output ended with FinishReason.ERROR
    embedding: bytes | None = None  # little-endian float32, packed; see unpack_floats

    @property
    def lora_request(self) -> None:
        """Adapters are not served; scripts look here all the same."""

    @property
    def encoder_prompt(self) -> None:
        """No model with an encoder is served; scripts look here all the same."""

    @property
    def encoder_prompt_token_ids(self) -> None:
        """As :attr:`encoder_prompt`."""

    @property
    def kv_transfer_params(self) -> None:
        """Keys and values stay where they are; scripts look here all the same."""


def unpack_floats(packed: bytes) -> list[float]:
    """The numbers of an embedding."""
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))


class RequestStream(Protocol):
    """The outputs of one admitted request, in order. Ends after the one with ``finished``.

    Outputs that a slow reader has not taken are merged, so the buffer stays bounded by the request. There is
    one reader: it iterates, or takes what there is whenever it is told that there is something.

    Raises:
        EngineDeadError: from iteration and ``take``, when the engine ended before the request did.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> list[int]: ...
    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    async def __anext__(self) -> RequestOutput: ...
    def take(self) -> RequestOutput | None:
        """What has come since the last time; ``None`` if nothing has. Waits for nothing."""

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called on the event loop whenever there is something to take, a failure too.

        A callback of several streams is called once for all that one step gave them. It must not raise.
        """

    def abort(self) -> None:
        """Stop computing. Waits for nothing, may be called at any time, any number of times."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine tells its callers once it is ready."""

    model: str  # path of the checkpoint
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    attention_backend: str
    num_threads: int
    num_parameters: int
    load_s: float
    num_host_blocks: int = 0  # of the host tier
    enable_prefix_caching: bool = True
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    max_logprobs: int = 20  # alternatives that may be asked for; -1: any number
    scheduling_policy: str = "fcfs"  # "priority": requests may have one
    hidden_size: int = 0  # numbers in an embedding
    pooling_type: str = "last"  # of embeddings that ask for none
    kv_windows: tuple[int | None, ...] = (None,)  # per KV group: tokens that a query sees, or all
    num_sequence_blocks: int = 0  # most blocks of one sequence of max_model_len; 0: without windows

    @property
    def kv_concurrency(self) -> float:
        """Sequences of ``max_model_len`` tokens that the KV cache holds at once."""
        without_windows = -(-self.max_model_len // self.block_size) * len(self.kv_windows)
        return self.num_blocks / (self.num_sequence_blocks or without_windows)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache holds; where there are windows, of the longest sequences."""
        if self.kv_windows == (None,):
            return self.num_blocks * self.block_size
        return int(self.kv_concurrency * self.max_model_len)


@dataclass(frozen=True, slots=True)
class KVBlock:
    """One block of the device pool."""

    id: int
    ref_count: int  # block tables that point at it
    num_filled: int  # leading slots whose keys and values are valid
    is_cached: bool  # findable by its content
    seq_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVSequence:
    """One sequence and where its keys and values lie."""

    request_id: str
    seq_id: int
    status: str  # "running", "waiting" (never computed, or preempted)
    num_tokens: int  # whose keys and values were computed
    block_table: tuple[int, ...]  # of all KV groups, without blocks that fell out of a window


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """KV memory between two steps."""

    num_blocks: int
    block_size: int
    blocks: tuple[KVBlock, ...]
    sequences: tuple[KVSequence, ...]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far the start has come."""

    stage: str  # "starting", "loading", "packing", "warming", "ready"
    fraction: float  # 0..1 over the whole start


class Engine(Protocol):
    """A running engine, as the server sees it. All methods belong to one event loop."""

    async def start(self) -> None:
        """Attach to the running event loop. Called once, before anything else; does not wait."""

    @property
    def info(self) -> EngineInfo:
        """Limits and facts.

        Raises:
            EngineNotReadyError: the engine is still loading.
        """

    @property
    def progress(self) -> LoadProgress: ...

    def check_ready(self) -> None:
        """Return if requests are accepted now.

        Raises:
            EngineNotReadyError: loading or shutting down.
            EngineDeadError: the engine ended.
        """

    def check_alive(self) -> None:
        """Return unless the engine ended.

        Raises:
            EngineDeadError: it did.
        """

    async def submit(self, requests: Sequence[GenerationRequest]) -> Sequence[RequestStream]:
        """Admit requests, all or none, and start computing them.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; none of ``requests`` runs.
            OverloadedError: too much is queued.
            EngineNotReadyError, EngineDeadError: nothing is accepted now.
        """

    async def render(self, requests: Sequence[GenerationRequest]) -> list[RenderedRequest]:
        """Admit requests as :meth:`submit` does, and compute nothing.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong.
            EngineNotReadyError, EngineDeadError: nothing is accepted now.
        """

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt of any length, which may exceed the window.

        Raises:
            InvalidRequestError: it is not valid text, or a chat that the template cannot render.
            EngineNotReadyError, EngineDeadError: nothing is accepted now.
        """

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens; special tokens show.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
            EngineNotReadyError, EngineDeadError: nothing is accepted now.
        """

    async def vocabulary_entries(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary writes these tokens, which is not always the text they stand for.

        Raises:
            EngineNotReadyError, EngineDeadError: there is no tokenizer to ask.
        """

    def tokenizer_info(self) -> Mapping[str, Any]:
        """Facts about the tokenizer, the chat template among them.

        Raises:
            EngineNotReadyError, EngineDeadError: there is no tokenizer to ask.
        """

    def stats(self) -> EngineStats | None:
        """The last snapshot, from memory; ``None`` before the first one."""

    def set_stats_sink(self, sink: StatsSink) -> None: ...

    async def kv_snapshot(self) -> KVSnapshot:
        """KV memory, asked of the engine between two steps.

        Raises:
            EngineNotReadyError, EngineDeadError: there is none to ask.
        """

    async def reset_prefix_cache(self) -> None:
        """Forget every prefix, so that nothing computed so far is hit again. Running requests go on.

        Raises:
            EngineNotReadyError, EngineDeadError: there is no engine to tell.
        """

    async def wait_dead(self) -> None:
        """Return when the engine has ended for any reason other than :meth:`close`."""

    async def close(self) -> None:
        """End every live request with ``FinishReason.ABORT``, then end the engine."""
