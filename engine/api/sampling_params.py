"""How tokens are chosen and when a sequence stops, with the range of every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from .checks import check_finite, check_int, check_range, refuse

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
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this select the most likely token."""


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

    @property
    def has_masks(self) -> bool:
        """Whether some tokens are never chosen."""
        return self.allowed_token_ids is not None or bool(self.bad_word_ids)

    def with_changes(self, **changes: Any) -> Self:
        """A copy with other values, checked again."""
        return replace(self, **changes)

    def _check_numbers(self) -> None:
        check_range("temperature", self.temperature, 0.0, 2.0)
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_finite("top_p", self.top_p)
        if not 0.0 < self.top_p <= 1.0:
            refuse("top_p", f"top_p must be in (0, 1], got {self.top_p}.")
        check_finite("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0.0:
            got = self.repetition_penalty
            refuse(
                "repetition_penalty", f"repetition_penalty must be greater than zero, got {got}."
            )
        check_int("top_k", self.top_k)
        if self.top_k < 0:
            refuse("top_k", f"top_k must be 0 or -1 (off), or at least 1, got {self.top_k}.")
        if self.seed is not None:
            check_int("seed", self.seed)
            if not -(2**63) <= self.seed < 2**63:
                refuse("seed", f"seed must fit in 64 bits, got {self.seed}.")

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
            check_int(name, value)
            if value < least:
                refuse(name, f"{name} must be at least {least}, got {value}.")
            if most is not None and value > most:
                refuse(name, f"{name} must be at most {most}, got {value}.")
        if self.best_of is not None and self.best_of < self.n:
            refuse("best_of", f"best_of must be at least n={self.n}, got {self.best_of}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit, got = self.max_tokens, self.min_tokens
            refuse("min_tokens", f"min_tokens must be at most max_tokens={limit}, got {got}.")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            got = len(self.stop)
            refuse("stop", f"stop must hold at most {MAX_STOP_STRINGS} strings, got {got}.")
        texts: tuple[Any, ...] = self.stop
        for text in texts:
            if not isinstance(text, str):
                refuse("stop", f"stop must be a string or a list of strings, got {text!r}.")
            if not text:
                refuse("stop", "stop cannot contain an empty string.")
            if len(text) > MAX_STOP_STRING_CHARS:
                limit = MAX_STOP_STRING_CHARS
                refuse("stop", f"a stop string must be at most {limit} characters long.")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            refuse("stop_token_ids", f"stop_token_ids must hold at most {MAX_STOP_TOKEN_IDS} ids.")
        for token_id in self.stop_token_ids:
            check_int("stop_token_ids", token_id)
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            limit = MAX_LOGPROB_TOKEN_IDS
            refuse("logprob_token_ids", f"logprob_token_ids must hold at most {limit} ids.")
        for token_id in self.logprob_token_ids:
            check_int("logprob_token_ids", token_id)
        if self.stop and not self.detokenize:
            refuse("stop", "stop strings need detokenize=True.")

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            refuse("logit_bias", f"logit_bias must hold at most {MAX_LOGIT_BIAS} tokens.")
        checked: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            check_int("logit_bias", key)
            check_range("logit_bias", value, -100.0, 100.0)
            checked[key] = float(value)
        object.__setattr__(self, "logit_bias", checked or None)

    def _check_masks(self) -> None:
        allowed = self.allowed_token_ids
        if allowed is not None:
            if not 0 < len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
                limit = MAX_ALLOWED_TOKEN_IDS
                refuse("allowed_token_ids", f"allowed_token_ids must hold 1 to {limit} ids.")
            for token_id in allowed:
                check_int("allowed_token_ids", token_id)
        if len(self.bad_words) > MAX_BAD_WORDS:
            refuse("bad_words", f"bad_words must hold at most {MAX_BAD_WORDS} words.")
        words: tuple[Any, ...] = self.bad_words
        for word in words:
            if not isinstance(word, str) or not word.strip():
                refuse("bad_words", f"bad_words must hold texts that are not blank, got {word!r}.")
            if len(word) > MAX_BAD_WORD_CHARS:
                limit = MAX_BAD_WORD_CHARS
                refuse("bad_words", f"a bad word must be at most {limit} characters long.")

    def _check_beams(self) -> None:
        check_range("length_penalty", self.length_penalty, -50.0, 50.0)
        got = self.early_stopping
        if not isinstance(got, bool) and got != "never":
            refuse("early_stopping", f'early_stopping must be true, false or "never", got {got!r}.')
        if not self.use_beam_search:
            return
        if self.stop:
            refuse("stop", "stop strings cannot end a beam; use stop_token_ids.")
        if len(self.stop_token_ids) > MAX_BEAM_STOP_TOKEN_IDS:
            limit = MAX_BEAM_STOP_TOKEN_IDS
            refuse("stop_token_ids", f"stop_token_ids must hold at most {limit} ids with beams.")
        if self.prompt_logprobs is not None:
            refuse("prompt_logprobs", "prompt_logprobs cannot be had from a beam search.")
        if self.max_tokens == 0:
            refuse("max_tokens", "max_tokens must be at least 1 in a beam search.")
        for name, neutral in (
            ("temperature", (0.0, 1.0)),
            ("top_p", (1.0,)),
            ("top_k", (0,)),
            ("min_p", (0.0,)),
        ):
            if getattr(self, name) not in neutral:
                refuse(name, f"{name} has no meaning in a beam search, which draws nothing.")
