"""``LLM``: the engine in this process, for scripts and notebooks."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from .api import (
    ChatPrompt,
    GenerationRequest,
    KVSnapshot,
    PoolingParams,
    Prompt,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from .build import build_core, find_checkpoint
from .config import EngineConfig
from .errors import ConfigError, InvalidRequestError
from .service.admission import Admission
from .service.beam_params import BeamSearchOutput, BeamSearchParams, beam_search_output
from .service.embedding_output import EmbeddingRequestOutput, embedding_output
from .service.output import RequestState, merge
from .stats import EngineStats
from .text.chat_template import load_chat_template
from .text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

PromptLike = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, with ``"cache_salt"``
where only prompts of the same salt may share cached blocks."""
Message = Mapping[str, Any]
Params = TypeVar("Params", SamplingParams, PoolingParams)


class LLM:
    """A model, ready to generate.

    Args:
        model: a Hugging Face folder or one GGUF file; ``None`` for the embedded model.
        options: any engine option of docs/configuration.md under its flag's name with underscores, as in
            ``block_size=16``.

    Raises:
        ConfigError: an option is wrong or cannot work with this model or machine.
        CheckpointError: the model cannot be used.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        config = EngineConfig.from_options({"model": model, **options})
        checkpoint = find_checkpoint(config)
        self._tokenizer = load_tokenizer(checkpoint, config.model.tokenizer)
        chat_template = load_chat_template(checkpoint, self._tokenizer, config.model.chat_template)
        core, self._info = build_core(config, 0)
        self._core = core
        self._admission = Admission(self._info, self._tokenizer, chat_template, config.model.seed)
        self._request_ids = count()
        self._is_closed = False

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: one or many; see :data:`PromptLike`. A list of integers is one prompt.
            sampling_params: for all prompts, or one for each; ``None``: the model's defaults.
            use_tqdm: show a progress bar on standard error.

        Returns:
            One output per prompt, in the prompts' order.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was computed.
        """
        many = [prompts] if _is_one_prompt(prompts) else list(prompts)
        salts = [_cache_salt(one) for one in many]
        return self._run([_prompt(one) for one in many], salts, sampling_params, use_tqdm)

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Find likely continuations by beam search.

        ``generate`` with ``SamplingParams(use_beam_search=True)`` computes the same and returns only what
        was generated; here ``tokens`` and ``text`` of a sequence begin with the prompt's.

        Args:
            prompts: one or many; see :data:`PromptLike`. A list of integers is one prompt.
            params: for all prompts.
            use_tqdm: show a progress bar on standard error.

        Returns:
            One output per prompt, in the prompts' order, each with ``beam_width`` sequences, best first.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was computed.
        """
        outputs = self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm)
        return [beam_search_output(output, self._tokenizer) for output in outputs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template.

        Returns, raises: as :meth:`generate`.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts = [
            ChatPrompt(
                conversation,
                add_generation_prompt and not continue_final_message,
                continue_final_message,
                template_kwargs=chat_template_kwargs or {},
            )
            for conversation in conversations
        ]
        return self._run(prompts, [None] * len(prompts), sampling_params, use_tqdm)

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Turn prompts into vectors: the model's last hidden states, pooled.

        Args:
            prompts: one or many; see :data:`PromptLike`. A list of integers is one prompt.
            pooling_params: for all prompts, or one for each; ``None``: the engine's ``pooling_type``, all
                dimensions, of length 1.
            truncate_prompt_tokens: of a longer prompt only its last so many tokens count; -1: the window.
            use_tqdm: show a progress bar on standard error.

        Returns:
            One output per prompt, in the prompts' order.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was computed.
        """
        many = [prompts] if _is_one_prompt(prompts) else list(prompts)
        given = PoolingParams() if pooling_params is None else pooling_params
        poolings = _for_each("pooling_params", given, len(many))
        requests = [
            GenerationRequest(
                str(next(self._request_ids)),
                _prompt(prompt),
                SamplingParams(max_tokens=0),
                time.monotonic(),
                cache_salt=_cache_salt(prompt),
                max_prompt_tokens=truncate_prompt_tokens,
                pooling=pooling,
            )
            for prompt, pooling in zip(many, poolings, strict=True)
        ]
        return [embedding_output(output) for output in self._compute(requests, use_tqdm)]

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The neutral parameters with the model's own defaults."""
        return SamplingParams(**self._info.default_sampling)

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self._core.stats()

    def kv_snapshot(self) -> KVSnapshot:
        """Every block of the KV memory and every sequence in it."""
        self._check_open()
        return self._core.kv_snapshot()

    def reset_prefix_cache(self) -> None:
        """Forget every prefix, so that nothing computed so far is used again."""
        self._check_open()
        self._core.reset_prefix_cache()

    def close(self) -> None:
        """Give back the model's memory. May be called more than once."""
        self._is_closed = True
        vars(self).pop("_core", None)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("This LLM has been closed.")

    # --- one batch -------------------------------------------------------------------------------

    def _run(
        self,
        prompts: Sequence[Prompt],
        salts: Sequence[str | None],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self._params_for(len(prompts), sampling_params)
        requests = [
            GenerationRequest(
                str(next(self._request_ids)), prompt, sampling, time.monotonic(), cache_salt=salt
            )
            for prompt, salt, sampling in zip(prompts, salts, params, strict=True)
        ]
        return self._compute(requests, use_tqdm)

    def _compute(
        self, requests: Sequence[GenerationRequest], use_tqdm: bool
    ) -> list[RequestOutput]:
        """The whole outputs of requests, in their order."""
        self._check_open()
        admitted = [self._admission.admit(request) for request in requests]
        states = [RequestState(one, self._tokenizer) for one in admitted]
        results: dict[str, RequestOutput] = {}
        bar = _progress_bar(len(states)) if use_tqdm else None
        try:
            for state in states:
                self._core.add(state.admitted.new)
            for output in self._outputs({state.request_id: state for state in states}):
                earlier = results.setdefault(output.request_id, output)
                if earlier is not output:
                    merge(earlier, output)
                if output.finished and bar is not None:
                    bar.update()
        finally:
            self._core.abort([state.request_id for state in states])
            if bar is not None:
                bar.close()
        ordered = [results[state.request_id] for state in states]
        for result in ordered:
            result.outputs.sort(key=lambda output: output.index)
        return ordered

    def _params_for(
        self, num_prompts: int, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        return _for_each("sampling_params", sampling_params, num_prompts)

    def _outputs(self, states: dict[str, RequestState]) -> Iterator[RequestOutput]:
        """Step until every request is done, yielding deltas."""
        while self._core.has_work:
            with _interrupt_between_steps():
                updates = self._core.step().updates
            now = time.monotonic()
            for update in updates:
                state = states.get(update.request_id)
                if state is None:
                    continue
                output, stopped_here = state.apply(update, now)
                if stopped_here:
                    self._core.abort([], [(update.request_id, index) for index in stopped_here])
                yield output


@contextmanager
def _interrupt_between_steps() -> Iterator[None]:
    """Hold Ctrl-C back until the step is committed, so that the engine stays usable after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        raise KeyboardInterrupt


def _for_each(param: str, given: Params | Sequence[Params], num_prompts: int) -> list[Params]:
    """One for all prompts, or one for each, as one for each."""
    if not isinstance(given, Sequence):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequestError(f"{num_prompts} prompts and {len(given)} {param}.", param=param)
    return list(given)


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (str, Mapping)):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], int)


def _prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return TokensPrompt(list(prompt["prompt_token_ids"]))
        if isinstance(prompt.get("prompt"), str):
            return TextPrompt(prompt["prompt"])
        raise InvalidRequestError("A prompt needs 'prompt' or 'prompt_token_ids'.", param="prompts")
    if isinstance(prompt, Sequence) and all(isinstance(token_id, int) for token_id in prompt):
        return TokensPrompt(list(prompt))
    raise InvalidRequestError(
        f"A prompt must be a string, token ids or a dictionary, got {type(prompt).__name__}.",
        param="prompts",
    )


def _cache_salt(prompt: Any) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and not isinstance(salt, str):
        raise InvalidRequestError(f"cache_salt must be a text, got {salt!r}.", param="cache_salt")
    return salt


def _progress_bar(total: int) -> tqdm[Any]:
    from tqdm import tqdm

    return tqdm(total=total, desc="prompts", unit="prompt", dynamic_ncols=True)
