"""The door: from a caller's request to one that the scheduler can serve, or a clear refusal.

Renders chats, tokenises, checks every limit and resolves what was left open (maximal length, seed), so
that nothing wrong reaches a step. Must not know sockets or processes.
"""

from __future__ import annotations

import copy
import random
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..api import (
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    ChatPrompt,
    EngineInfo,
    GenerationRequest,
    PoolingParams,
    Prompt,
    SamplingParams,
    TextPrompt,
)
from ..errors import InvalidRequestError, NotSupportedError
from ..memory.block_demand import BlockDemand
from ..scheduling.request import NewRequest
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer

_NOT_IN_SALTS = frozenset("@/\\\0")
_NO_OUTPUT = SamplingParams(max_tokens=0, temperature=0.0, seed=0, detokenize=False)


class Admitted(NamedTuple):
    """A request that passed the door."""

    new: NewRequest
    prompt: str | None  # the text, as given or rendered; None for token ids
    stop_strings_by_id: dict[int, str]  # stop strings that are one special token each
    is_continuation: bool  # the output goes on in the prompt's text; in a chat it begins anew
    echo: bool = False  # see GenerationRequest
    aligns_tokens: bool = False  # see GenerationRequest


class Admission:
    """Checks and translates requests. Thread-safe but for the order in which seeds are drawn.

    Args:
        seed: of the generator that gives requests without a seed theirs; ``None``: the system's entropy.
    """

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        seed: int | None = None,
    ) -> None:
        self._info = info
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._random = random.Random(seed) if seed is not None else secrets.SystemRandom()

    def with_chat_template(self, template: ChatTemplate) -> Admission:
        """The same door, where chats are rendered with another template."""
        other = copy.copy(self)
        other._chat_template = template
        return other

    def admit(self, request: GenerationRequest) -> Admitted:
        """Check one request.

        Raises:
            InvalidRequestError: it cannot be served; names the parameter and the numbers.
        """
        if request.pooling is not None:
            request = self._pooled(request, request.pooling)
        sampling = request.sampling
        refuse_unsupported(request)
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_ids("logit_bias", tuple(sampling.logit_bias or ()))
        self._check_ids("logprob_token_ids", sampling.logprob_token_ids)
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        self._check_seats(sampling)
        self._check_logprobs(sampling)
        _check_salt(request.cache_salt)
        self._check_priority(request.priority)
        text, prompt_token_ids = self._prompt(request)
        max_tokens = self._max_tokens(len(prompt_token_ids), request)
        by_id = self._special_stops(sampling)
        seed = sampling.seed if sampling.seed is not None else self._random.getrandbits(63)
        resolved = sampling.with_changes(
            max_tokens=max_tokens,
            min_tokens=min(sampling.min_tokens, max_tokens),
            stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *by_id))),
            bad_word_ids=self._bad_word_ids(sampling),
        )
        new = NewRequest(
            request.request_id,
            prompt_token_ids,
            resolved,
            seed,
            request.arrival_time,
            request.priority,
            request.cache_salt,
            request.resume,
            request.pooling,
        )
        is_cut = request.max_prompt_tokens is not None
        if request.echo and (text is None or is_cut):
            text = self.tokenizer.decode(prompt_token_ids, sampling.skip_special_tokens)
        return Admitted(
            new,
            text,
            by_id,
            not isinstance(request.prompt, ChatPrompt),
            request.echo,
            request.aligns_tokens or sampling.logprobs is not None,
        )

    def _pooled(self, request: GenerationRequest, pooling: PoolingParams) -> GenerationRequest:
        """A request for an embedding, with what was left open filled in."""
        most = self._info.hidden_size
        if pooling.dimensions is not None and pooling.dimensions > most:
            raise InvalidRequestError(
                f"dimensions must be 1 to {most} with this model, got {pooling.dimensions}.",
                param="dimensions",
            )
        kind = pooling.pooling_type or self._info.pooling_type
        return replace(request, sampling=_NO_OUTPUT, pooling=replace(pooling, pooling_type=kind))

    # --- prompt ----------------------------------------------------------------------------------

    def tokenize(self, prompt: Prompt) -> list[int]:
        """See :meth:`octavo.engine.api.Engine.tokenize`."""
        if isinstance(prompt, ChatPrompt):
            return self.tokenizer.encode(self._render(prompt), prompt.add_special_tokens)
        if isinstance(prompt, TextPrompt):
            return self.tokenizer.encode(prompt.text, prompt.add_special_tokens)
        return list(prompt.token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """See :meth:`octavo.engine.api.Engine.detokenize`."""
        self._check_ids("tokens", token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _render(self, prompt: ChatPrompt) -> str:
        if self._chat_template is None:
            raise InvalidRequestError(
                "This model has no chat template. Use /v1/completions, or start the server with "
                "--chat-template FILE.",
                param="messages",
            )
        return self._chat_template.render(prompt)

    def _prompt(self, request: GenerationRequest) -> tuple[str | None, list[int]]:
        prompt, param = request.prompt, "input" if request.pooling else "prompt"
        if isinstance(prompt, ChatPrompt):
            text = self._render(prompt)
            token_ids = self._tokenise(text, prompt.add_special_tokens, "messages", request)
            return text, token_ids
        if isinstance(prompt, TextPrompt):
            text = prompt.text
            return text, self._tokenise(text, prompt.add_special_tokens, param, request)
        token_ids = self._cut(list(prompt.token_ids), request)
        if not token_ids:
            raise InvalidRequestError("The prompt is empty.", param=param)
        self._check_length(len(token_ids), param, request)
        self._check_ids(param, token_ids)
        return None, token_ids

    def _tokenise(
        self, text: str, add_special_tokens: bool, param: str, request: GenerationRequest
    ) -> list[int]:
        limit = self._info.max_model_len
        max_chars = limit * self.tokenizer.max_token_chars
        if len(text) > max_chars and request.max_prompt_tokens is None:
            raise InvalidRequestError(
                f"The prompt has {len(text)} characters; {limit} tokens, the model's maximum context "
                f"length, cannot hold more than {max_chars}.",
                param=param,
                code="context_length_exceeded",
            )
        token_ids = self._cut(self.tokenizer.encode(text, add_special_tokens), request)
        if not token_ids:
            raise InvalidRequestError("The prompt is empty.", param=param)
        self._check_length(len(token_ids), param, request)
        return token_ids

    def _cut(self, token_ids: list[int], request: GenerationRequest) -> list[int]:
        """The prompt's end, or its start, where it is longer than the request wants it."""
        most, limit = request.max_prompt_tokens, self._info.max_model_len
        if most is None:
            return token_ids
        if most != -1 and not 1 <= most <= limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be -1 or 1 to {limit}, got {most}.",
                param="truncate_prompt_tokens",
            )
        if most == -1:
            least = _least_output(request)
            most = max(1, limit - max(least, request.sampling.max_tokens or least))
        return token_ids[:most] if request.keeps_prompt_start else token_ids[-most:]

    def _check_length(self, num_prompt_tokens: int, param: str, request: GenerationRequest) -> None:
        limit, least = self._info.max_model_len, _least_output(request)
        if num_prompt_tokens > limit - least:
            why = ", which leaves no room for output" if least else ""
            raise InvalidRequestError(
                f"This model's maximum context length is {limit} tokens, and the prompt has "
                f"{num_prompt_tokens}{why}. Shorten the prompt.",
                param=param,
                code="context_length_exceeded",
            )

    def _check_ids(self, param: str, token_ids: Sequence[int]) -> None:
        invalid = self.tokenizer.first_invalid_id(token_ids)
        if invalid is not None:
            raise InvalidRequestError(
                f"{param} holds token id {invalid}, which is not in the vocabulary "
                f"(0 to {self._info.vocab_size - 1}).",
                param=param,
            )

    def _check_seats(self, sampling: SamplingParams) -> None:
        limit, num_sequences = self._info.max_num_seqs, sampling.num_sequences
        if num_sequences > limit:
            param = "n" if sampling.n > limit else "best_of"
            raise InvalidRequestError(
                f"{param}={getattr(sampling, param)} is more than this server computes at the same "
                f"time: {limit} sequences (--max-num-seqs).",
                param=param,
            )

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(
                f"priority must be an integer, got {priority!r}.", param="priority"
            )
        if not -(2**63) <= priority < 2**63:
            raise InvalidRequestError(
                f"priority must fit in 64 bits, got {priority}.", param="priority"
            )
        if priority and self._info.scheduling_policy != "priority":
            raise NotSupportedError(
                "priority needs --scheduling-policy priority: here requests run first come, first "
                "served.",
                param="priority",
            )

    def _check_logprobs(self, sampling: SamplingParams) -> None:
        limit = self._info.max_logprobs
        for param in ("logprobs", "prompt_logprobs"):
            asked = getattr(sampling, param)
            if asked is not None and limit != -1 and not 0 <= asked <= limit:
                raise InvalidRequestError(
                    f"{param} must be 0 to {limit} on this server (--max-logprobs), got {asked}.",
                    param=param,
                )

    # --- lengths ---------------------------------------------------------------------------------

    def _max_tokens(self, num_prompt_tokens: int, request: GenerationRequest) -> int:
        """``max_tokens`` as a number: absent, all that fits; past the window, clamped to it."""
        sampling = request.sampling
        asked, limit = sampling.max_tokens, self._info.max_model_len
        looks_at_prompt = request.echo or request.pooling or sampling.prompt_logprobs is not None
        if asked == 0 and not looks_at_prompt:
            raise InvalidRequestError(
                "max_tokens must be at least 1, got 0: only the prompt's log-probabilities or its echo "
                "can be had without output.",
                param="max_tokens",
            )
        if asked is not None and asked > limit:
            raise InvalidRequestError(
                f"max_tokens={asked} is more than the model's maximum context length of {limit} tokens "
                f"(the prompt has {num_prompt_tokens}).",
                param="max_tokens",
                code="context_length_exceeded",
            )
        room = limit - num_prompt_tokens
        max_tokens = room if asked is None else min(asked, room)
        if asked is None:
            fitting = self._fitting_tokens(num_prompt_tokens, max_tokens, sampling)
            max_tokens = max(1, min(max_tokens, fitting))
        self._check_pool(num_prompt_tokens, max_tokens, sampling)
        return max_tokens

    def _num_blocks_needed(
        self, num_prompt_tokens: int, max_tokens: int, sampling: SamplingParams
    ) -> int:
        info = self._info
        demand = BlockDemand(info.block_size, info.kv_windows, info.max_num_batched_tokens)
        return demand.of_request(
            num_prompt_tokens,
            max_tokens,
            sampling.num_sequences,
            is_beam_search=sampling.use_beam_search,
        )

    def _fitting_tokens(self, num_prompt_tokens: int, most: int, sampling: SamplingParams) -> int:
        """Output tokens, up to ``most``, that ``_check_pool`` lets through."""
        return bisect_right(
            range(1, most + 1),
            self._info.num_blocks,
            key=lambda count: self._num_blocks_needed(num_prompt_tokens, count, sampling),
        )

    def _check_pool(
        self, num_prompt_tokens: int, max_tokens: int, sampling: SamplingParams
    ) -> None:
        n = sampling.num_sequences
        needed = self._num_blocks_needed(num_prompt_tokens, max_tokens, sampling)
        if needed > self._info.num_blocks:
            raise InvalidRequestError(
                f"A prompt of {num_prompt_tokens} tokens and {n} x {max_tokens} output tokens needs "
                f"{needed} KV blocks of {self._info.block_size} tokens; there are "
                f"{self._info.num_blocks}.",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _bad_word_ids(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of each bad word, at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in sampling.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                found[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        if len(found) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                f"bad_words can be written in {len(found)} ways; the limit is {MAX_BAD_WORDS}.",
                param="bad_words",
            )
        return tuple(found)

    def _special_stops(self, sampling: SamplingParams) -> dict[int, str]:
        """Stop strings that are the text of one special token, which never shows in the text."""
        found = {self.tokenizer.special_token_id(text): text for text in sampling.stop}
        return {token_id: text for token_id, text in found.items() if token_id is not None}


def _least_output(request: GenerationRequest) -> int:
    """Tokens of the window that a prompt must leave."""
    return 0 if request.pooling or request.sampling.max_tokens == 0 else 1


def _check_salt(salt: str | None) -> None:
    if salt is None:
        return
    if not 0 < len(salt) <= MAX_CACHE_SALT_CHARS:
        raise InvalidRequestError(
            f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters, got {len(salt)}.",
            param="cache_salt",
        )
    if not _NOT_IN_SALTS.isdisjoint(salt) or any("\ud800" <= char <= "\udfff" for char in salt):
        raise InvalidRequestError(
            "cache_salt must not hold '@', '/', '\\', NUL or half a character.", param="cache_salt"
        )


def refuse_unsupported(request: GenerationRequest) -> None:
    """Refuse what the scheduler knows and this door does not check.

    Raises:
        NotSupportedError: naming the field.
    """
    if request.resume:
        raise NotSupportedError("resume is not supported by this server.", param="resume")
