"""``LLM``: the engine in this process, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .api import KVSnapshot, PoolingParams, Prompt, RequestOutput, SamplingParams
from .build import build_core, find_checkpoint, with_local_model
from .config.engine_config import EngineConfig
from .errors import NotSupportedError
from .service.admission import Admission
from .service.beam_params import BeamSearchOutput, BeamSearchParams, beam_search_output
from .service.embedding_output import EmbeddingRequestOutput, embedding_output
from .service.offline_engine import OfflineEngine
from .service.offline_methods import ABSENT
from .service.offline_options import engine_options
from .service.offline_params import SamplingParams as ScriptSamplingParams
from .service.offline_progress import download_bar
from .service.offline_prompts import Message, PromptLike, as_conversations, chat_prompt
from .service.offline_requests import (
    AskedPrompts,
    asked_prompts,
    embedding_requests,
    generation_requests,
    refuse_given,
    tokenization,
)
from .service.offline_tokenizer import ScriptTokenizer
from .service.output import RequestState
from .stats import EngineStats
from .text.chat_template import ChatTemplate, load_chat_template
from .text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tqdm import tqdm


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
        with download_bar() as on_progress:
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
        self._engine = OfflineEngine(core, self._tokenizer)
        self._admission = Admission(self._info, self._tokenizer, chat_template, config.model.seed)
        self._request_ids = count()
        self._enqueued: list[RequestState] = []

    def __getattr__(self, name: str) -> Any:
        reason = ABSENT.get(name)
        if reason is None:
            raise AttributeError(f"LLM has no {name!r}.")
        raise AttributeError(f"LLM has no {name}(): {reason}.")

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
        refuse_given(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        asked = asked_prompts(prompts, tokenization_kwargs)
        states = self._submit(asked, sampling_params, priority, self._admission)
        return self._engine.run(states, use_tqdm)

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
        refuse_given(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        if chat_template_content_format not in ("auto", "string"):
            raise NotSupportedError(
                "chat_template_content_format must be auto or string: parts are always joined.",
                param="chat_template_content_format",
            )
        is_special, cut = tokenization(tokenization_kwargs, add_special_tokens=False)
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
        asked = AskedPrompts(prompts, [None] * len(prompts), cut)
        states = self._submit(asked, sampling_params, priority, admission)
        return self._engine.run(states, use_tqdm)

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
        refuse_given(lora_request=lora_request)
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
        self._engine.check_open()
        given = PoolingParams() if pooling_params is None else pooling_params
        requests = embedding_requests(self._request_ids, prompts, given, truncate_prompt_tokens)
        outputs = self._engine.run(self._engine.submit(requests, self._admission), use_tqdm)
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
        refuse_given(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        asked = asked_prompts(prompts, tokenization_kwargs)
        states = self._submit(asked, sampling_params, priority, self._admission)
        with self._engine.turn:
            self._enqueued += states
        return [state.request_id for state in states]

    def wait_for_completion(
        self, use_tqdm: bool | Callable[..., tqdm[Any]] = True
    ) -> list[RequestOutput]:
        """The outputs of all prompts that were queued, in the order in which they were."""
        self._engine.check_open()
        with self._engine.turn:
            states, self._enqueued = self._enqueued, []
        return self._engine.run(states, use_tqdm)

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
        return self._engine.stats()

    def kv_snapshot(self) -> KVSnapshot:
        """Every block of the KV memory and every sequence in it."""
        return self._engine.kv_snapshot()

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
        self._engine.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Give back the model's memory. May be called more than once."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _template(self, source: str) -> ChatTemplate:
        tokenizer = self._tokenizer
        return ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

    def _submit(
        self,
        asked: AskedPrompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        admission: Admission,
    ) -> list[RequestState]:
        """Queue what a call asks for."""
        self._engine.check_open()
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        requests = generation_requests(self._request_ids, asked, sampling_params, priority)
        return self._engine.submit(requests, admission)
