"""The front end's side of the engine: keeps a process running, admits requests, turns tokens into text.

Implements :class:`octavo.engine.api.Engine` for one event loop. When an engine process dies, another is started
(:mod:`.supervisor` says when and for whom), and live requests go on there. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

import zmq

from ..api import (
    ChatPrompt,
    Engine,
    EngineInfo,
    FinishReason,
    GenerationRequest,
    KVSnapshot,
    LoadProgress,
    Prompt,
    RenderedRequest,
    TextPrompt,
)
from ..checkpoint.checkpoint import Checkpoint
from ..config.engine_config import EngineConfig
from ..config.supervision import DEFAULT_SUPERVISION, Supervision
from ..errors import (
    ConfigError,
    EngineDeadError,
    EngineNotReadyError,
    EngineRefusedError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
)
from ..stats import EngineStats, StatsSink
from ..text.chat_template import ChatTemplate, load_chat_template
from ..text.tokenizer import Tokenizer, load_tokenizer
from .admission import Admission, Admitted
from .engine_life import EngineLife
from .engine_stream import EngineStream
from .frames import (
    Abort,
    Add,
    Answer,
    Failed,
    Hello,
    KVSnapshotRequest,
    Loading,
    ResetPrefixCache,
    Snapshot,
    Step,
    ToEngine,
    decode_from_engine,
    to_wire,
)
from .output import RequestState
from .queue_bounds import QueueBounds, Wanted
from .supervisor import Supervisor
from .vital_signs import Signs

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

THREAD_SIZE = 4096
"""Requests with more characters or token ids than this are admitted off the event loop."""
REQUEST_SIZE = 64
"""What admitting one more request costs beside its prompt, in characters."""
MAX_TEXT_THREADS = 2
"""More of them would keep the event loop waiting for its turn at the interpreter and the cores."""
MAX_NEW_WHILE_AWAY = 1024
"""Requests that may come and wait while there is no engine, on top of those that lived when it died."""
SOUND_S = 600.0
"""An engine that was ready for so long and died with nothing to do was sound until then."""
RESTARTING = "The engine is being started again."


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
        self._command = command
        self._log_level = log_level
        self._supervision = supervision
        self._supervisor = Supervisor(supervision.max_restarts)
        self._context = zmq.Context()
        try:
            self._life = self._spawn(epoch=0)
        except ConfigError:
            self._context.term()
            raise
        self._is_up = False  # the engine takes requests
        self._last_words: str | None = None  # of the engine, why it ends
        self._restarting: asyncio.Task[None] | None = None
        self._num_restarts = 0
        self._max_streams = 0  # while requests wait for an engine
        self._progress = LoadProgress("starting", 0.0)
        self._info: EngineInfo | None = None
        self._stats: EngineStats | None = None
        self._sink: StatsSink | None = None
        self._tokenizer: Tokenizer | None = None
        self._chat_template: ChatTemplate | None = None
        self._admission: Admission | None = None
        self._streams: dict[str, EngineStream] = {}
        self._handed: dict[str, EngineStream] = {}  # those that the engine has, by its own ids
        self._bounds = QueueBounds(config.scheduler)
        self._questions: dict[int, asyncio.Future[KVSnapshot | None]] = {}
        self._question_ids = count()
        self._death: EngineDeadError | None = None
        self._dead: asyncio.Event | None = None
        self._is_closing = False
        self._text_task: asyncio.Task[None] | None = None
        self._text_threads = ThreadPoolExecutor(MAX_TEXT_THREADS, "text")

    # --- life ------------------------------------------------------------------------------------

    def _spawn(self, epoch: int) -> EngineLife:
        try:
            return EngineLife(self._context, self._config, self._command, self._log_level, epoch)
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(f"The engine process cannot be started: {error}.") from error

    async def start(self) -> None:
        """See :meth:`octavo.engine.api.Engine.start`."""
        self._dead = asyncio.Event()
        self._life.attach(self._supervision, self._on_frame, self._on_end)
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
        cache = replace(self._config.cache, num_gpu_blocks_override=info.num_blocks)
        self._config = replace(self._config, cache=cache)  # what fits now fits the next engine
        self._is_up = True
        self._open_door()
        self._feed()

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
        signs, was_up = life.last_signs(), self._is_up
        dying = self._dying(signs) if was_up else []
        is_old = time.monotonic() - life.begin >= SOUND_S
        was_sound = was_up and is_old and not signs.is_busy and not self._handed
        for stream in self._handed.values():
            stream.engine_id = None
        self._handed = {}
        self._is_up, self._last_words = False, None
        self._tell_gauges()
        verdict = self._supervisor.died(dying, was_sound=was_sound)
        if verdict.convicted is not None:
            self._convict(verdict.convicted)
        if verdict.is_over:
            self._die(EngineDeadError(reason))
            return
        self._fail_questions(EngineNotReadyError(RESTARTING))
        logger.error("%s; another is started in %.2g s", reason.rstrip("."), verdict.delay_s)
        if self._supervisor.is_isolating:
            logger.warning(
                "requests run one at a time until it is clear which of them ends the engine"
            )
        self._num_restarts += 1
        self._max_streams = len(self._streams) + MAX_NEW_WHILE_AWAY
        self._progress = LoadProgress("restarting", 0.0)
        self._restarting = asyncio.create_task(self._restart(life, verdict.delay_s))

    def _dying(self, signs: Signs) -> list[str]:
        """Requests of the step in which the engine died, or all that it had if it was between two."""
        if signs.dying_ids is not None:
            found = (self._handed.get(engine_id) for engine_id in signs.dying_ids)
            return [stream.request_id for stream in found if stream is not None]
        return [one.request_id for one in self._handed.values()] if signs.is_busy else []

    async def _restart(self, last: EngineLife, delay_s: float) -> None:
        try:
            await last.close()
            self._life = await self._start_again(last.epoch + 1, delay_s)
            self._life.attach(self._supervision, self._on_frame, self._on_end)
        except Exception as error:
            logger.exception("the engine cannot be started again")
            self._die(EngineDeadError(f"{type(error).__name__}: {error}"))

    async def _start_again(self, epoch: int, delay_s: float) -> EngineLife:
        while True:
            await asyncio.sleep(delay_s)
            try:
                return self._spawn(epoch)
            except ConfigError as error:  # no file, no memory: it may come back
                logger.error("%s", error)
                verdict = self._supervisor.died(())
                if verdict.is_over:
                    raise
                delay_s = verdict.delay_s

    def _convict(self, request_id: str) -> None:
        """Answer the request that kills engines with an error."""
        stream = self._streams.pop(request_id)
        logger.error("request %s ends the engine process, and is given up", request_id)
        outputs = stream.state.abort(FinishReason.ERROR).outputs
        stream.put(outputs, "The engine process ended whenever it computed this request.")
        stream.wake()
        self._record_finished(stream.state)

    def _tell_gauges(self) -> None:
        """Nothing runs and no block is in use."""
        if self._stats is None:
            return
        self._stats = replace(
            self._stats,
            num_running=0,
            num_waiting=len(self._streams),
            num_used_blocks=0,
            num_used_slots=0,
            num_cached_blocks=0,
            num_shared_blocks=0,
            num_saved_blocks=0,
            num_used_host_blocks=0,
        )
        if self._sink is not None:
            self._sink.record_stats(self._stats)

    def _die(self, reason: EngineDeadError) -> None:
        """The engine is gone for good: everyone who waits is told, once."""
        if self._death is not None or self._is_closing:
            return
        self._death = reason
        self._is_up = False
        streams, self._streams, self._handed = list(self._streams.values()), {}, {}
        for stream in streams:
            stream.fail(reason)
        self._fail_questions(reason)
        if self._dead is not None:
            self._dead.set()

    async def wait_dead(self) -> None:
        """See :meth:`octavo.engine.api.Engine.wait_dead`."""
        if self._dead is None:
            raise EngineNotReadyError("The engine client has not been started.")
        await self._dead.wait()

    async def close(self) -> None:
        """See :meth:`octavo.engine.api.Engine.close`."""
        for request_id in list(self._streams):
            self.abort(request_id)
        self._is_closing = True
        self._fail_questions(EngineDeadError("The engine has been closed."))
        if self._restarting is not None:
            self._restarting.cancel()
        await self._life.close()
        if self._text_task is not None:
            self._text_task.cancel()
        self._text_threads.shutdown(wait=False)  # those who wait hear of the end then
        self._context.term()

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
        if not self._is_up:
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
        return self._num_restarts

    def stats(self) -> EngineStats | None:
        return self._stats

    def set_stats_sink(self, sink: StatsSink) -> None:
        self._sink = sink

    # --- requests --------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[GenerationRequest]) -> list[EngineStream]:
        """See :meth:`octavo.engine.api.Engine.submit`."""
        admission = self._door()
        self._check_queue([Wanted.of(request.sampling) for request in requests])
        admitted = await self._admit(admission, requests)
        news = [one.new for one in admitted]
        self._check_queue([Wanted.of(n.sampling, len(n.prompt_token_ids)) for n in news])
        ids = [one.new.request_id for one in admitted]
        if len(self._streams.keys() | set(ids)) < len(self._streams) + len(ids):
            raise InvalidRequestError("A request with this id is running.", param="request_id")
        has_to_wait = not self._is_up or self._supervisor.is_isolating
        if has_to_wait and len(self._streams) + len(ids) > self._max_streams:
            raise OverloadedError(
                f"{RESTARTING} Too many requests wait for it.",
                reason="engine_restarting",
                retry_after_s=2.0,
            )
        streams = [
            EngineStream(RequestState(one, admission.tokenizer), self.abort) for one in admitted
        ]
        self._streams.update(zip(ids, streams, strict=True))
        if not has_to_wait:
            self._hand_over(streams)
        return streams

    def _check_queue(self, wanted: Sequence[Wanted]) -> None:
        """Refuse what would wait behind too much. First before, then after it is tokenised."""
        if self._bounds.is_set:
            live = [stream.state for stream in self._streams.values()]
            is_full = self._stats is not None and self._stats.num_waiting > 0
            self._bounds.check(live, wanted, 0 if is_full else self.info.max_num_seqs, self.info)

    def _hand_over(self, streams: Iterable[EngineStream]) -> None:
        """Give these to the engine, from where they are."""
        new = []
        for stream in streams:
            new.append(to_wire(stream.hand(stream.state.resume())))
            self._handed[new[-1].request_id] = stream
        if new:
            self._send(Add(tuple(new)))

    def _feed(self) -> None:
        """Give the engine of those that wait what it may have."""
        if not self._is_up:
            return
        waiting = {i: stream for i, stream in self._streams.items() if stream.engine_id is None}
        is_anyone_running = bool(self._handed)
        chosen = self._supervisor.choose(waiting.keys(), is_anyone_running=is_anyone_running)
        self._hand_over([waiting[request_id] for request_id in chosen])

    def _take_back(self, stream: EngineStream) -> None:
        """The engine shall forget a request."""
        if stream.engine_id is not None:
            del self._handed[stream.engine_id]
            self._send(Abort((stream.engine_id,)))
            stream.engine_id = None

    async def _admit(
        self, admission: Admission, requests: Sequence[GenerationRequest]
    ) -> list[Admitted]:
        size = sum(_prompt_size(request.prompt) for request in requests)
        size += REQUEST_SIZE * (len(requests) - 1)
        return await self._text_work(size, _admit_all, admission, requests)

    async def _text_work(
        self, size: int, work: Callable[[*Arguments], Result], *args: *Arguments
    ) -> Result:
        """Do ``work`` here if it is small, else on a thread: tokenising releases the GIL."""
        if size <= THREAD_SIZE:
            return work(*args)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._text_threads, work, *args)
        self._door()
        return result

    def abort(self, request_id: str) -> None:
        """End a request. Unknown ids have finished and are passed over."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        stream.put(stream.state.abort().outputs, None)
        stream.wake()
        self._record_finished(stream.state)
        self._take_back(stream)
        if self._supervisor.is_watchful:
            self._supervisor.forget(request_id)
            self._feed()

    # --- text ------------------------------------------------------------------------------------

    async def render(self, requests: Sequence[GenerationRequest]) -> list[RenderedRequest]:
        """See :meth:`octavo.engine.api.Engine.render`."""
        admitted = await self._admit(self._door(), requests)
        return [_rendered(one) for one in admitted]

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """See :meth:`octavo.engine.api.Engine.tokenize`."""
        return await self._text_work(_prompt_size(prompt), self._door().tokenize, prompt)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See :meth:`octavo.engine.api.Engine.detokenize`."""
        return await self._text_work(len(token_ids), self._door().detokenize, token_ids)

    async def vocabulary_entries(self, token_ids: Sequence[int]) -> list[str]:
        """See :meth:`octavo.engine.api.Engine.vocabulary_entries`."""
        tokenizer = self._door().tokenizer
        return await self._text_work(len(token_ids), tokenizer.vocabulary_entries, token_ids)

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
        snapshot = await self._ask(KVSnapshotRequest)
        if snapshot is None:
            raise EngineDeadError("The engine answered another question.")
        return snapshot

    async def reset_prefix_cache(self) -> None:
        """See :meth:`octavo.engine.api.Engine.reset_prefix_cache`."""
        await self._ask(ResetPrefixCache)

    async def _ask(
        self, question: Callable[[int], KVSnapshotRequest | ResetPrefixCache]
    ) -> KVSnapshot | None:
        """Send a question and wait for its answer, or for the end of the engine."""
        self.check_ready()
        question_id = next(self._question_ids)
        answer: asyncio.Future[KVSnapshot | None] = asyncio.get_running_loop().create_future()
        self._questions[question_id] = answer
        self._send(question(question_id))
        try:
            return await answer
        finally:
            self._questions.pop(question_id, None)

    def _answer(self, frame: Answer) -> None:
        """Hand an answer over. Whoever asked may have stopped waiting."""
        answer = self._questions.get(frame.question_id)
        if answer is not None and not answer.done():
            answer.set_result(frame.snapshot)

    def _fail_questions(self, reason: OctavoError) -> None:
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(reason)

    # --- frames ----------------------------------------------------------------------------------

    def _send(self, frame: ToEngine) -> None:
        """Hand a frame to the engine, if there is one; never waits."""
        if self._is_up:
            self._life.send(frame)

    def _on_frame(self, data: bytes) -> None:
        try:
            self._receive(data)
        except Exception as error:
            logger.exception("a frame of the engine cannot be handled")
            self._die(EngineDeadError(f"{type(error).__name__}: {error}"))

    def _receive(self, data: bytes) -> None:
        frame = decode_from_engine(data)
        if isinstance(frame, Step):
            self._stats = frame.stats
            if self._sink is not None:
                self._sink.record_step(frame.stats, frame.num_step_tokens)
            self._deliver(frame)
        elif isinstance(frame, Snapshot):
            self._stats = frame.stats
            if self._sink is not None:
                self._sink.record_stats(frame.stats)
        elif isinstance(frame, Loading):
            self._life.hide()
            self._progress = LoadProgress(frame.stage, min(frame.fraction, 0.99))
        elif isinstance(frame, Hello):
            self._on_hello(frame.info)
        elif isinstance(frame, Answer):
            self._answer(frame)
        elif isinstance(frame, Failed):
            self._last_words = frame.message
            # Not so if an earlier engine was ready with the same options.
            if frame.is_refusal and self._info is None:
                self._die(EngineRefusedError(frame.message))
            self._life.kill()  # it has said its last words

    def _deliver(self, step: Step) -> None:
        now = time.monotonic()
        handed, sink = self._handed, self._sink
        gained: list[str] = []
        stopped: list[tuple[str, int]] = []
        ready: dict[Callable[[], None], None] = {}  # in order, each once
        for update in step.updates:
            stream = handed.get(update.request_id)
            if stream is None:
                continue
            state = stream.state
            outputs, error, stopped_here = state.advance(update, now, sink)
            if stopped_here:
                stopped += [(update.request_id, child_index) for child_index in stopped_here]
            if state.is_finished:
                del handed[update.request_id], self._streams[stream.request_id]
                self._record_finished(state)
            if state.is_finished or (update.token_ids and state.has_gained()):
                gained.append(stream.request_id)
            if outputs:
                stream.put(outputs, error)
                ready[stream.callback or stream.wake] = None
        if stopped:
            self._send(Abort(sequences=tuple(stopped)))
        if gained:
            self._note_gain(gained)
        for tell in ready:
            tell()

    def _note_gain(self, request_ids: list[str]) -> None:
        """Tell the supervisor, and let the next one run where they run one at a time."""
        supervisor = self._supervisor
        if not supervisor.is_watchful:
            supervisor.gained()
            return
        was_isolating = supervisor.is_isolating
        passed = self._streams.get(supervisor.gained(request_ids) or "")
        if passed is not None:
            self._take_back(passed)
        if was_isolating:
            self._feed()

    def _record_finished(self, state: RequestState) -> None:
        if self._sink is not None:
            self._sink.record_finished(state.record(time.monotonic()))


def _prompt_size(prompt: Prompt) -> int:
    """Characters or token ids; a chat always counts as large, since its template may be slow."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return THREAD_SIZE + 1 if isinstance(prompt, ChatPrompt) else len(prompt.token_ids)


def _admit_all(admission: Admission, requests: Sequence[GenerationRequest]) -> list[Admitted]:
    return [admission.admit(request) for request in requests]


def _rendered(admitted: Admitted) -> RenderedRequest:
    new = admitted.new
    return RenderedRequest(
        new.request_id, admitted.prompt, list(new.prompt_token_ids), new.sampling
    )
