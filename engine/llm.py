"""``LLM``: the engine in this process, for scripts and notebooks."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from .api import (
    GenerationRequest,
    KVSnapshot,
    PoolingParams,
    Prompt,
    RequestOutput,
    SamplingParams,
)
from .build import build_core, find_checkpoint, with_local_model
from .config.engine_config import EngineConfig
from .errors import ConfigError, InvalidRequestError, NotSupportedError
from .scheduling.request import SequenceUpdate
from .service.admission import Admission
from .service.beam_params import BeamSearchOutput, BeamSearchParams, beam_search_output
from .service.embedding_output import EmbeddingRequestOutput, embedding_output
from .service.offline_options import engine_options
from .service.offline_params import SamplingParams as ScriptSamplingParams
from .service.offline_prompts import (
    Message,
    PromptLike,
    as_conversations,
    as_prompts,
    cache_salt,
    chat_prompt,
    engine_prompt,
)
from .service.offline_tokenizer import ScriptTokenizer
from .service.output import RequestState, merge
from .stats import EngineStats
from .text.chat_template import ChatTemplate, load_chat_template
from .text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

ABSENT = {
    "encode": "octavo generates text; see also embed()",
    "classify": "there are no classifiers",
    "score": "there are no cross-encoders",
    "get_metrics": "stats() has the engine's counters and gauges",
    "collective_rpc": "the model runs in this process",
    "apply_model": "the model runs in this process",
    "start_profile": "profile this process from outside",
    "stop_profile": "profile this process from outside",
    "sleep": "close() gives back the model's memory",
    "wake_up": "the engine does not sleep",
    "release_kv_cache_memory": "close() gives back all memory",
    "reset_mm_cache": "there is no cache but that of prefixes",
    "from_engine_args": "options are arguments of LLM()",
    "init_weight_transfer_engine": "weights stay as they are",
    "start_weight_update": "weights stay as they are",
    "update_weights": "weights stay as they are",
    "finish_weight_update": "weights stay as they are",
}
"""Methods that other engines have, and why there is none here."""
Params = TypeVar("Params", SamplingParams, PoolingParams)


class LLM:
    """A model, ready to generate.

    Several threads may use it: they take turns at the engine, and a step computes the requests of all.

    Args:
        model: a Hugging Face folder, one GGUF file, or a repository of the Hub as ``"ORG/NAME"``, which is
            fetched; ``None`` for the embedded model.
        options: any engine option of docs/configuration.md under its flag's name with underscores, as in
            ``block_size=16``. Names of other engines' options are accepted where they ask for nothing
            that octavo does not do; ``chat_template`` may be a file or the template itself.

    Raises:
        ConfigError: an option is wrong or cannot work with this model or machine.
        CheckpointError: the model cannot be used.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        options = engine_options(options)
        template = options.pop("chat_template", None)
        is_source = isinstance(template, str) and "{" in template
        config = EngineConfig.from_options(
            {"model": model, **options, "chat_template": None if is_source else template}
        )
        with _download_bar() as on_progress:
            config = with_local_model(config, on_progress)
        checkpoint = find_checkpoint(config)
        self._tokenizer = load_tokenizer(checkpoint, config.model.tokenizer)
        if is_source:
            chat_template: ChatTemplate | None = self._template(template)
        else:
            chat_template = load_chat_template(
                checkpoint, self._tokenizer, config.model.chat_template
            )
        self._script_tokenizer = ScriptTokenizer(self._tokenizer, chat_template)
        core, self._info = build_core(config, 0)
        self._core = core
        self._admission = Admission(self._info, self._tokenizer, chat_template, config.model.seed)
        self._request_ids = count()
        self._live: dict[str, RequestState] = {}
        self._results: dict[str, RequestOutput] = {}
        self._enqueued: list[RequestState] = []
        self._is_closed = False
        self._turn = (
            threading.RLock()
        )  # of whoever touches the engine or what is noted of its requests

    def __getattr__(self, name: str) -> Any:
        reason = ABSENT.get(name)
        if reason is None:
            raise AttributeError(f"LLM has no {name!r}.")
        raise AttributeError(f"LLM has no {name}(): {reason}.")

    # --- generation ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: one or many; see :data:`PromptLike`. A list of integers is one prompt.
            sampling_params: for all prompts, or one for each; ``None``: the model's defaults.
            use_tqdm: show a progress bar on standard error, or what makes one.
            priority: of each prompt, lower first; needs ``scheduling_policy="priority"``.
            tokenization_kwargs: ``add_special_tokens`` (default true) and ``truncate_prompt_tokens``.
            lora_request: not offered.
            mm_processor_kwargs: not offered.

        Returns:
            One output per prompt, in the prompts' order.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was computed.
        """
        _refuse_given(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        requests = self._requests(prompts, sampling_params, priority, tokenization_kwargs)
        return self._run(self._submit(requests, self._admission), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template.

        Args:
            messages: one conversation or many.
            sampling_params: as in :meth:`generate`.
            use_tqdm: as in :meth:`generate`.
            lora_request: not offered.
            priority: as in :meth:`generate`.
            chat_template: in place of the model's, as Jinja.
            chat_template_content_format: parts of a content are always joined: "auto" or "string".
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: go on in the last message instead.
            tools: shown by templates that know them; the answer's text is not parsed.
            chat_template_kwargs: passed on to the template.
            tokenization_kwargs: ``add_special_tokens`` (default false) and ``truncate_prompt_tokens``.
            mm_processor_kwargs: not offered.

        Returns, raises: as :meth:`generate`.
        """
        _refuse_given(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        if chat_template_content_format not in ("auto", "string"):
            raise NotSupportedError(
                "chat_template_content_format must be auto or string: parts are always joined.",
                param="chat_template_content_format",
            )
        is_special, cut = _tokenization(tokenization_kwargs, add_special_tokens=False)
        prompts: list[Prompt] = [
            chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs or {},
                add_special_tokens=is_special,
            )
            for conversation in as_conversations(messages)
        ]
        admission = self._admission
        if chat_template is not None:
            admission = admission.with_chat_template(self._template(chat_template))
        salts = [None] * len(prompts)
        requests = self._as_requests(prompts, salts, sampling_params, priority, cut)
        return self._run(self._submit(requests, admission), use_tqdm)

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find likely continuations by beam search.

        ``generate`` with ``SamplingParams(use_beam_search=True)`` computes the same and returns only what
        was generated; here ``tokens`` and ``text`` of a sequence begin with the prompt's.

        Args:
            prompts: one or many; see :data:`PromptLike`. A list of integers is one prompt.
            params: for all prompts.
            lora_request: not offered.
            use_tqdm: show a progress bar on standard error.
            concurrency_limit: of no effect: as many are computed at the same time as there is room for.

        Returns:
            One output per prompt, in the prompts' order, each with ``beam_width`` sequences, best first.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was computed.
        """
        _refuse_given(lora_request=lora_request)
        outputs = self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm)
        return [beam_search_output(output, self._tokenizer) for output in outputs]

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
    ) -> list[EmbeddingRequestOutput]:
        """Turn prompts into vectors: the model's last hidden states, pooled.

        Args:
            prompts: one or many; see :data:`PromptLike`. A list of integers is one prompt.
            pooling_params: for all prompts, or one for each; ``None``: the engine's ``pooling_type``, all
                dimensions, of length 1.
            truncate_prompt_tokens: of a longer prompt only its last so many tokens count; -1: the window.
            use_tqdm: as in :meth:`generate`.

        Returns:
            One output per prompt, in the prompts' order.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was computed.
        """
        self._check_open()
        many = as_prompts(prompts)
        given = PoolingParams() if pooling_params is None else pooling_params
        requests = [
            GenerationRequest(
                str(next(self._request_ids)),
                engine_prompt(prompt, add_special_tokens=True),
                SamplingParams(max_tokens=0),
                time.monotonic(),
                cache_salt=cache_salt(prompt),
                max_prompt_tokens=truncate_prompt_tokens,
                pooling=pooling,
            )
            for prompt, pooling in zip(
                many, _for_each("pooling_params", PoolingParams, given, len(many)), strict=True
            )
        ]
        outputs = self._run(self._submit(requests, self._admission), use_tqdm)
        return [embedding_output(output) for output in outputs]

    def enqueue(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = False,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: None = None,
    ) -> list[str]:
        """Queue prompts. They are computed by :meth:`wait_for_completion`, or beside others before that.

        Args, raises: as :meth:`generate`.

        Returns:
            Their request ids.
        """
        _refuse_given(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        requests = self._requests(prompts, sampling_params, priority, tokenization_kwargs)
        states = self._submit(requests, self._admission)
        with self._turn:
            self._enqueued += states
        return [state.request_id for state in states]

    def wait_for_completion(
        self, use_tqdm: bool | Callable[..., tqdm[Any]] = True
    ) -> list[RequestOutput]:
        """The outputs of all prompts that were queued, in the order in which they were."""
        self._check_open()
        with self._turn:
            states, self._enqueued = self._enqueued, []
        return self._run(states, use_tqdm)

    def get_tokenizer(self) -> ScriptTokenizer:
        """The model's tokenizer."""
        return self._script_tokenizer

    def get_default_sampling_params(self) -> ScriptSamplingParams:
        """The neutral parameters with the model's own defaults; they may be changed."""
        return ScriptSamplingParams(**self._info.default_sampling)

    def get_world_size(self) -> int:
        """Devices that the model runs on."""
        return 1

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        with self._turn:
            self._check_open()
            return self._core.stats()

    def kv_snapshot(self) -> KVSnapshot:
        """Every block of the KV memory and every sequence in it."""
        with self._turn:
            self._check_open()
            return self._core.kv_snapshot()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget every prefix, so that nothing computed so far is used again.

        Args:
            reset_running_requests: must be false: requests that run go on.
            reset_connector: of no effect: there is no other cache.

        Returns:
            True: it is always possible.
        """
        if reset_running_requests:
            raise NotSupportedError(
                "reset_running_requests is not supported: requests that run go on.",
                param="reset_running_requests",
            )
        with self._turn:
            self._check_open()
            self._core.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Give back the model's memory. May be called more than once."""
        with self._turn:
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

    def _template(self, source: str) -> ChatTemplate:
        tokenizer = self._tokenizer
        return ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

    # --- requests --------------------------------------------------------------------------------

    def _requests(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[GenerationRequest]:
        is_special, cut = _tokenization(tokenization_kwargs, add_special_tokens=True)
        many = as_prompts(prompts)
        salts = [cache_salt(one) for one in many]
        asked = [engine_prompt(one, add_special_tokens=is_special) for one in many]
        return self._as_requests(asked, salts, sampling_params, priority, cut)

    def _as_requests(
        self,
        prompts: Sequence[Prompt],
        salts: Sequence[str | None],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        max_prompt_tokens: int | None,
    ) -> list[GenerationRequest]:
        self._check_open()
        priorities = [0] * len(prompts) if priority is None else list(priority)
        if len(priorities) != len(prompts):
            raise InvalidRequestError(
                f"{len(prompts)} prompts and {len(priorities)} priorities.", param="priority"
            )
        params = self._params_for(len(prompts), sampling_params)
        return [
            GenerationRequest(
                str(next(self._request_ids)),
                prompt,
                sampling,
                time.monotonic(),
                rank,
                salt,
                max_prompt_tokens=max_prompt_tokens,
            )
            for prompt, salt, sampling, rank in zip(prompts, salts, params, priorities, strict=True)
        ]

    def _params_for(
        self, num_prompts: int, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        return _for_each("sampling_params", SamplingParams, sampling_params, num_prompts)

    def _submit(
        self, requests: Sequence[GenerationRequest], admission: Admission
    ) -> list[RequestState]:
        """Admit requests, all or none, and queue them."""
        with self._turn:
            self._check_open()
            states = [RequestState(admission.admit(one), self._tokenizer) for one in requests]
            for state in states:
                self._core.add(state.admitted.new)
                self._live[state.request_id] = state
        return states

    def _run(
        self, states: Sequence[RequestState], use_tqdm: bool | Callable[..., tqdm[Any]]
    ) -> list[RequestOutput]:
        """Step until these requests are done; others that are queued advance beside them."""
        bar = _progress_bar(len(states), use_tqdm)
        ids = [state.request_id for state in states]
        num_done = 0
        try:
            while (left := [i for i in ids if i in self._live]) and self._step():
                if bar is not None and len(ids) - len(left) > num_done:
                    bar.update(len(ids) - len(left) - num_done)
                    num_done = len(ids) - len(left)
            results = [self._results.pop(request_id) for request_id in ids]
            if bar is not None:
                bar.update(len(ids) - num_done)
        finally:
            self._forget(ids)
            if bar is not None:
                bar.close()
        for result in results:
            result.outputs.sort(key=lambda output: output.index)
        return results

    def _forget(self, request_ids: Sequence[str]) -> None:
        with self._turn:
            if not self._is_closed:
                self._core.abort(request_ids)
            for request_id in request_ids:
                self._live.pop(request_id, None)
                self._results.pop(request_id, None)

    def _step(self) -> bool:
        """Compute one step, and put what it gave to the results.

        Returns:
            Whether there was anything to compute.
        """
        with self._turn:
            self._check_open()
            if not self._core.has_work:
                return False
            with _interrupt_between_steps():
                self._note(self._core.step().updates)
            return True

    def _note(self, updates: Sequence[SequenceUpdate]) -> None:
        now = time.monotonic()
        for update in updates:
            state = self._live.get(update.request_id)
            if state is None:
                continue
            output, stopped_here = state.apply(update, now)
            if stopped_here:
                self._core.abort([], [(update.request_id, index) for index in stopped_here])
            earlier = self._results.setdefault(output.request_id, output)
            if earlier is not output:
                merge(earlier, output)
            if output.finished:
                del self._live[output.request_id]


@contextmanager
def _interrupt_between_steps() -> Iterator[None]:
    """Hold Ctrl-C back until a step is committed and noted, so that the engine and others' requests go on."""
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


def _refuse_given(**given: Any) -> None:
    """
    Raises:
        NotSupportedError: one of these arguments, which are not offered, was given.
    """
    for name, value in given.items():
        if value:
            raise NotSupportedError(f"{name} is not supported.", param=name)


def _tokenization(
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


def _progress_bar(total: int, use_tqdm: bool | Callable[..., tqdm[Any]]) -> tqdm[Any] | None:
    if not use_tqdm:
        return None
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="prompts")
    from tqdm import tqdm

    return tqdm(total=total, desc="prompts", unit="prompt", dynamic_ncols=True)


@contextmanager
def _download_bar() -> Iterator[Callable[[float], None]]:
    """What shows a download's progress on a terminal; nothing while there is none."""
    from tqdm import tqdm

    bars: list[tqdm[Any]] = []

    def show(fraction: float) -> None:
        if not bars:
            bars.append(tqdm(total=100, desc="Downloading", unit="%", disable=None))
        bars[0].update(int(100 * fraction) - bars[0].n)

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()
