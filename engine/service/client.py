"""The front end's side of the engine: keeps a process running, admits requests, turns tokens into text.

Implements :class:`octavo.engine.api.Engine` for one event loop. When an engine process dies, another is started
(:mod:`.supervisor` says when and for whom), and live requests go on there. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..api import (
    Engine,
    EngineInfo,
    GenerationRequest,
    KVSnapshot,
    LoadProgress,
    Prompt,
    RenderedRequest,
)
from ..checkpoint.checkpoint import Checkpoint
from ..config.engine_config import EngineConfig
from ..config.supervision import DEFAULT_SUPERVISION, Supervision
from ..errors import ConfigError, EngineDeadError, EngineNotReadyError, EngineRefusedError
from ..stats import EngineStats, StatsSink
from ..text.chat_template import ChatTemplate, load_chat_template
from ..text.tokenizer import Tokenizer, load_tokenizer
from .admission import Admission, Admitted
from .engine_life import EngineLife
from .engine_lives import RESTARTING, EngineLives
from .engine_stream import EngineStream
from .frames import (
    Answer,
    Failed,
    Hello,
    KVSnapshotRequest,
    Loading,
    ResetPrefixCache,
    Snapshot,
    Step,
    decode_from_engine,
)
from .live_requests import LiveRequests
from .questions import Questions
from .queue_bounds import Wanted
from .stats_relay import StatsRelay
from .supervisor import Supervisor
from .text_work import TextWork, prompt_size

logger = logging.getLogger(__name__)

SOUND_S = 600.0
"""An engine that was ready for so long and died with nothing to do was sound until then."""


class EngineClient(Engine):
    """A running engine process and what the front end keeps for it.

    Args:
        config: for the engine; its tokenizer and template are also read here.
        checkpoint: the model's files.
        command: starts the engine process.
        log_level: of the engine process.
        supervision: when it is started again.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        command: list[str],
        log_level: str,
        supervision: Supervision = DEFAULT_SUPERVISION,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._supervisor = Supervisor(supervision.max_restarts)
        self._lives = EngineLives(config, command, log_level, supervision, self._supervisor)
        self._last_words: str | None = None  # of the engine, why it ends
        self._progress = LoadProgress("starting", 0.0)
        self._info: EngineInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._chat_template: ChatTemplate | None = None
        self._admission: Admission | None = None
        self._relay = StatsRelay()
        self._requests = LiveRequests(self._lives, self._supervisor, config.scheduler, self._relay)
        self._questions = Questions(self._lives.send)
        self._death: EngineDeadError | None = None
        self._dead: asyncio.Event | None = None
        self._is_closing = False
        self._text_task: asyncio.Task[None] | None = None
        self._text_work = TextWork(self._door)

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """See :meth:`octavo.engine.api.Engine.start`."""
        self._dead = asyncio.Event()
        self._lives.attach(self._on_frame, self._on_end, self._die)
        self._text_task = asyncio.create_task(self._load_text())

    async def _load_text(self) -> None:
        """Read tokenizer and chat template while the engine loads the weights."""
        try:
            self._tokenizer = await asyncio.to_thread(
                load_tokenizer, self._checkpoint, self._config.model.tokenizer
            )
            self._chat_template = load_chat_template(
                self._checkpoint, self._tokenizer, self._config.model.chat_template
            )
        except ConfigError as error:
            self._die(EngineRefusedError(str(error)))
            return
        except Exception as error:
            logger.exception("the tokenizer cannot be loaded")
            self._die(EngineDeadError(f"{type(error).__name__}: {error}"))
            return
        self._open_door()

    def _open_door(self) -> None:
        if self._info is None or self._tokenizer is None:
            return
        if self._admission is None:
            self._admission = Admission(
                self._info, self._tokenizer, self._chat_template, self._config.model.seed
            )
        self._progress = LoadProgress("ready", 1.0)

    def _on_hello(self, info: EngineInfo) -> None:
        self._info = info
        self._lives.up(info.num_blocks)
        self._open_door()
        self._requests.feed()

    def _on_end(self, life: EngineLife, reason: str) -> None:
        """An engine process has ended."""
        if self._is_closing or self._death is not None:
            return
        try:
            self._bury(life, self._last_words or reason)
        except Exception as error:
            logger.exception("the end of the engine cannot be handled")
            self._die(EngineDeadError(f"{type(error).__name__}: {error}"))

    def _bury(self, life: EngineLife, reason: str) -> None:
        """Take everything back that the engine had, and start another one or give up."""
        if self._info is None:  # it has never been ready: another would fare no better
            self._die(EngineDeadError(reason))
            return
        signs, was_up = life.last_signs(), self._lives.is_up
        dying = self._requests.dying(signs) if was_up else []
        is_old = time.monotonic() - life.begin >= SOUND_S
        was_sound = was_up and is_old and not signs.is_busy and not self._requests.handed
        self._requests.take_all_back()
        self._lives.is_up, self._last_words = False, None
        self._relay.empty_gauges(len(self._requests.streams))
        verdict = self._supervisor.died(dying, was_sound=was_sound)
        if verdict.convicted is not None:
            self._requests.convict(verdict.convicted)
        if verdict.is_over:
            self._die(EngineDeadError(reason))
            return
        self._questions.fail(EngineNotReadyError(RESTARTING))
        logger.error("%s; another is started in %.2g s", reason.rstrip("."), verdict.delay_s)
        if self._supervisor.is_isolating:
            logger.warning(
                "requests run one at a time until it is clear which of them ends the engine"
            )
        self._requests.bound_waiting()
        self._progress = LoadProgress("restarting", 0.0)
        self._lives.restart(verdict.delay_s)

    def _die(self, reason: EngineDeadError) -> None:
        """The engine is gone for good: everyone who waits is told, once."""
        if self._death is not None or self._is_closing:
            return
        self._death = reason
        self._lives.is_up = False
        self._requests.fail(reason)
        self._questions.fail(reason)
        if self._dead is not None:
            self._dead.set()

    async def wait_dead(self) -> None:
        """See :meth:`octavo.engine.api.Engine.wait_dead`."""
        if self._dead is None:
            raise EngineNotReadyError("The engine client has not been started.")
        await self._dead.wait()

    async def close(self) -> None:
        """See :meth:`octavo.engine.api.Engine.close`."""
        for request_id in list(self._requests.streams):
            self.abort(request_id)
        self._is_closing = True
        self._questions.fail(EngineDeadError("The engine has been closed."))
        await self._lives.close()
        if self._text_task is not None:
            self._text_task.cancel()
        self._text_work.close()

    # --- state -----------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """See :attr:`octavo.engine.api.Engine.info`."""
        if self._info is None:
            raise EngineNotReadyError("The engine is still loading.")
        return self._info

    @property
    def progress(self) -> LoadProgress:
        return self._progress

    def check_alive(self) -> None:
        """See :meth:`octavo.engine.api.Engine.check_alive`."""
        if self._death is not None:
            raise self._death

    def check_ready(self) -> None:
        """See :meth:`octavo.engine.api.Engine.check_ready`."""
        self._door()
        if not self._lives.is_up:
            raise EngineNotReadyError(RESTARTING)

    def check_accepting(self) -> None:
        """See :meth:`octavo.engine.api.Engine.check_accepting`."""
        self._door()

    def _door(self) -> Admission:
        self.check_alive()
        if self._is_closing:
            raise EngineNotReadyError("The server is shutting down.")
        if self._admission is None:
            raise EngineNotReadyError("The model is still loading.")
        return self._admission

    @property
    def num_restarts(self) -> int:
        """See :attr:`octavo.engine.api.Engine.num_restarts`."""
        return self._lives.num_restarts

    def stats(self) -> EngineStats | None:
        return self._relay.last

    def set_stats_sink(self, sink: StatsSink) -> None:
        self._relay.sink = sink

    # --- requests --------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[GenerationRequest]) -> list[EngineStream]:
        """See :meth:`octavo.engine.api.Engine.submit`."""
        admission = self._door()
        wanted = [Wanted.of(request.sampling) for request in requests]
        self._requests.check_queue(wanted, self.info)
        admitted = await self._text_work.admit(admission, requests)
        news = [one.new for one in admitted]
        wanted = [Wanted.of(n.sampling, len(n.prompt_token_ids)) for n in news]
        self._requests.check_queue(wanted, self.info)
        return self._requests.add(admitted, admission.tokenizer)

    def abort(self, request_id: str) -> None:
        """End a request. Unknown ids have finished and are passed over."""
        self._requests.abort(request_id)

    # --- text ------------------------------------------------------------------------------------

    async def render(self, requests: Sequence[GenerationRequest]) -> list[RenderedRequest]:
        """See :meth:`octavo.engine.api.Engine.render`."""
        admitted = await self._text_work.admit(self._door(), requests)
        return [_rendered(one) for one in admitted]

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """See :meth:`octavo.engine.api.Engine.tokenize`."""
        return await self._text_work.run(prompt_size(prompt), self._door().tokenize, prompt)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See :meth:`octavo.engine.api.Engine.detokenize`."""
        return await self._text_work.run(len(token_ids), self._door().detokenize, token_ids)

    async def vocabulary_entries(self, token_ids: Sequence[int]) -> list[str]:
        """See :meth:`octavo.engine.api.Engine.vocabulary_entries`."""
        tokenizer = self._door().tokenizer
        return await self._text_work.run(len(token_ids), tokenizer.vocabulary_entries, token_ids)

    def tokenizer_info(self) -> Mapping[str, Any]:
        """See :meth:`octavo.engine.api.Engine.tokenizer_info`."""
        tokenizer, template = self._door().tokenizer, self._chat_template
        special = sorted(tokenizer.special_token_ids)
        texts = tokenizer.vocabulary_entries(special)
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",  # what transformers makes of such a file
            "model_max_length": self.info.max_model_len,
            "vocab_size": tokenizer.vocab_size,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "special_tokens": dict(zip(texts, special, strict=True)),
            "chat_template": None if template is None else template.source,
        }

    # --- questions -------------------------------------------------------------------------------

    async def kv_snapshot(self) -> KVSnapshot:
        """See :meth:`octavo.engine.api.Engine.kv_snapshot`."""
        self.check_ready()
        snapshot = await self._questions.ask(KVSnapshotRequest)
        if snapshot is None:
            raise EngineDeadError("The engine answered another question.")
        return snapshot

    async def reset_prefix_cache(self) -> None:
        """See :meth:`octavo.engine.api.Engine.reset_prefix_cache`."""
        self.check_ready()
        await self._questions.ask(ResetPrefixCache)

    # --- frames ----------------------------------------------------------------------------------

    def _on_frame(self, data: bytes) -> None:
        try:
            self._receive(data)
        except Exception as error:
            logger.exception("a frame of the engine cannot be handled")
            self._die(EngineDeadError(f"{type(error).__name__}: {error}"))

    def _receive(self, data: bytes) -> None:
        frame = decode_from_engine(data)
        if isinstance(frame, Step):
            self._relay.record_step(frame.stats, frame.num_step_tokens)
            self._requests.deliver(frame)
        elif isinstance(frame, Snapshot):
            self._relay.record_stats(frame.stats)
        elif isinstance(frame, Loading):
            self._lives.current.hide()
            self._progress = LoadProgress(frame.stage, min(frame.fraction, 0.99))
        elif isinstance(frame, Hello):
            self._on_hello(frame.info)
        elif isinstance(frame, Answer):
            self._questions.answer(frame)
        elif isinstance(frame, Failed):
            self._last_words = frame.message
            # Not so if an earlier engine was ready with the same options.
            if frame.is_refusal and self._info is None:
                self._die(EngineRefusedError(frame.message))
            self._lives.current.kill()  # it has said its last words


def _rendered(admitted: Admitted) -> RenderedRequest:
    new = admitted.new
    return RenderedRequest(
        new.request_id, admitted.prompt, list(new.prompt_token_ids), new.sampling
    )
