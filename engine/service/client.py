"""The front end's side of the engine: starts its process, admits requests, turns tokens into text.

Implements :class:`octavo.engine.api.Engine` for one event loop. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import zmq

from ..api import (
    ChatPrompt,
    CompletionOutput,
    Engine,
    EngineInfo,
    GenerationRequest,
    KVSnapshot,
    LoadProgress,
    Prompt,
    RenderedRequest,
    RequestOutput,
    TextPrompt,
)
from ..checkpoint.checkpoint import Checkpoint
from ..config import EngineConfig, engine_environment
from ..errors import (
    ConfigError,
    EngineDeadError,
    EngineNotReadyError,
    EngineRefusedError,
    InvalidRequestError,
)
from ..stats import EngineStats, StatsSink
from ..text.chat_template import ChatTemplate, load_chat_template
from ..text.tokenizer import Tokenizer, load_tokenizer
from .admission import Admission, Admitted
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
    encode,
    to_wire,
)
from .output import RequestState, merge_outputs
from .process import Launch, pack_launch
from .queue_bounds import QueueBounds, Wanted

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

THREAD_SIZE = 4096
"""Requests with more characters or token ids than this are admitted off the event loop."""
REQUEST_SIZE = 64
"""What admitting one more request costs beside its prompt, in characters."""
MAX_TEXT_THREADS = 2
"""More of them would keep the event loop waiting for its turn at the interpreter and the cores."""
EXIT_TIMEOUT_S = 2.0
MAX_FOLDER_CHARS = 80
"""Unix sockets' names have about 100 characters at most."""


class EngineStream:
    """The outputs of one request. See :class:`octavo.engine.api.RequestStream`."""

    def __init__(self, client: EngineClient, state: RequestState) -> None:
        self._client = client
        self.state = state
        self.callback: Callable[[], None] | None = None  # of the one who takes
        self._pending: list[CompletionOutput] = []
        self._pending_error: str | None = None  # why one of them failed
        self._is_ended = False
        self._death: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the one who reads

    @property
    def request_id(self) -> str:
        return self.state.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.state.prompt_token_ids

    def __aiter__(self) -> EngineStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while (output := self.take()) is None:
            if self._is_ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return output

    def take(self) -> RequestOutput | None:
        """See :meth:`octavo.engine.api.RequestStream.take`."""
        if not self._pending:
            if self._death is not None:
                raise self._death
            return None
        output = self.state.output(self._pending, self._pending_error)
        self._pending, self._pending_error = [], None
        self._is_ended = output.finished
        return output

    def on_ready(self, callback: Callable[[], None]) -> None:
        """See :meth:`octavo.engine.api.RequestStream.on_ready`."""
        self.callback = callback

    def abort(self) -> None:
        """See :meth:`octavo.engine.api.RequestStream.abort`."""
        self._client.abort(self.request_id)

    def put(self, outputs: list[CompletionOutput], error: str | None) -> None:
        """Keep deltas until they are taken. :meth:`wake` is the caller's to call."""
        if self._pending:
            merge_outputs(self._pending, outputs)
        else:
            self._pending = outputs
        self._pending_error = error or self._pending_error

    def fail(self, death: Exception) -> None:
        self._death = death
        self.wake()

    def wake(self) -> None:
        """Tell the reader that there is something to take."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: the reader was cancelled
            waiter.set_result(None)
        if self.callback is not None:
            self.callback()


class EngineClient(Engine):
    """A running engine process and what the front end keeps for it.

    Args:
        config: for the engine; its tokenizer and template are also read here.
        checkpoint: the model's files.
        command: starts the engine process.
        log_level: of the engine process.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, command: list[str], log_level: str
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._folder = _socket_folder()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        try:
            self._process = self._spawn(command, log_level)
        except OSError as error:
            self._release_socket()
            raise ConfigError(f"The engine process cannot be started: {error}.") from error
        self._progress = LoadProgress("starting", 0.0)
        self._info: EngineInfo | None = None
        self._stats: EngineStats | None = None
        self._sink: StatsSink | None = None
        self._tokenizer: Tokenizer | None = None
        self._chat_template: ChatTemplate | None = None
        self._admission: Admission | None = None
        self._streams: dict[str, EngineStream] = {}
        self._bounds = QueueBounds(config.scheduler)
        self._questions: dict[int, asyncio.Future[KVSnapshot | None]] = {}
        self._question_ids = count()
        self._death: EngineDeadError | None = None
        self._dead: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False
        self._text_task: asyncio.Task[None] | None = None
        self._text_threads = ThreadPoolExecutor(MAX_TEXT_THREADS, "text")

    # --- life ------------------------------------------------------------------------------------

    def _spawn(self, command: list[str], log_level: str) -> subprocess.Popen[bytes]:
        endpoint = f"ipc://{self._folder}/engine-0.sock"
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=engine_environment(self._config)
        )
        if process.stdin is not None:
            process.stdin.write(pack_launch(Launch(self._config, endpoint, 0, log_level)))
            process.stdin.flush()
        return process

    async def start(self) -> None:
        """See :meth:`octavo.engine.api.Engine.start`."""
        self._loop = asyncio.get_running_loop()
        self._dead = asyncio.Event()
        self._loop.add_reader(self._socket.FD, self._drain)
        self._loop.call_soon(self._drain)
        threading.Thread(target=self._watch_process, name="watch-engine", daemon=True).start()
        self._text_task = asyncio.create_task(self._load_text())

    def _watch_process(self) -> None:
        status = self._process.wait()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_exit, status)

    def _on_exit(self, status: int) -> None:
        if self._is_closing:
            return
        self._drain()
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        self._die(EngineDeadError(f"The engine process ended {how}."))

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
        if self._info is not None and self._tokenizer is not None:
            self._admission = Admission(
                self._info, self._tokenizer, self._chat_template, self._config.model.seed
            )
            self._progress = LoadProgress("ready", 1.0)

    def _die(self, reason: EngineDeadError) -> None:
        """The engine is gone: everyone who waits is told, once."""
        if self._death is not None or self._is_closing:
            return
        self._death = reason
        streams, self._streams = list(self._streams.values()), {}
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
        if self._process.stdin is not None:
            self._process.stdin.close()  # upon which the engine ends, whatever it is doing
        try:
            await asyncio.to_thread(self._process.wait, EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if self._text_task is not None:
            self._text_task.cancel()
        self._text_threads.shutdown(wait=False)  # those who wait hear of the end then
        self._release_socket()

    def _release_socket(self) -> None:
        if not self._socket.closed:
            if self._loop is not None:
                self._loop.remove_reader(self._socket.FD)
            self._socket.close()
        self._context.term()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

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

    def _door(self) -> Admission:
        self.check_alive()
        if self._is_closing:
            raise EngineNotReadyError("The server is shutting down.")
        if self._admission is None:
            raise EngineNotReadyError("The model is still loading.")
        return self._admission

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
        frame = Add(tuple(to_wire(one.new) for one in admitted))
        streams = [EngineStream(self, RequestState(one, admission.tokenizer)) for one in admitted]
        self._streams.update(zip(ids, streams, strict=True))
        self._send(frame)
        return streams

    def _check_queue(self, wanted: Sequence[Wanted]) -> None:
        """Refuse what would wait behind too much. First before, then after it is tokenised."""
        if self._bounds.is_set:
            live = [stream.state for stream in self._streams.values()]
            is_full = self._stats is not None and self._stats.num_waiting > 0
            self._bounds.check(live, wanted, 0 if is_full else self.info.max_num_seqs, self.info)

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
        self._send(Abort((request_id,)))

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
        self._door()
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

    def _fail_questions(self, reason: EngineDeadError) -> None:
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(reason)

    # --- frames ----------------------------------------------------------------------------------

    def _send(self, frame: ToEngine) -> None:
        """Hand a frame to the socket; never waits, since its queue has no bound of its own."""
        if self._death is None and not self._socket.closed:
            self._socket.send(encode(frame), zmq.DONTWAIT)
            if self._loop is not None:
                self._loop.call_soon(self._drain)  # a send may swallow the readable edge

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
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
            self._remove_folder()  # connected: the sockets need no name any more
            self._progress = LoadProgress(frame.stage, min(frame.fraction, 0.99))
        elif isinstance(frame, Hello):
            self._info = frame.info
            self._open_door()
        elif isinstance(frame, Answer):
            self._answer(frame)
        elif isinstance(frame, Failed):
            kind = EngineRefusedError if frame.is_refusal else EngineDeadError
            self._die(kind(frame.message))

    def _deliver(self, step: Step) -> None:
        now = time.monotonic()
        streams, sink = self._streams, self._sink
        stopped: list[tuple[str, int]] = []
        ready: dict[Callable[[], None], None] = {}  # in order, each once
        for update in step.updates:
            stream = streams.get(update.request_id)
            if stream is None:
                continue
            state = stream.state
            outputs, error, stopped_here = state.advance(update, now, sink)
            if stopped_here:
                stopped += [(update.request_id, child_index) for child_index in stopped_here]
            if state.is_finished:
                del streams[update.request_id]
                self._record_finished(state)
            if outputs:
                stream.put(outputs, error)
                ready[stream.callback or stream.wake] = None
        if stopped:
            self._send(Abort(sequences=tuple(stopped)))
        for tell in ready:
            tell()

    def _record_finished(self, state: RequestState) -> None:
        if self._sink is not None:
            self._sink.record_finished(state.record(time.monotonic()))


def _socket_folder() -> Path:
    """A new folder with mode 0700, its path short enough for the name of a socket."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-"))
    if len(str(folder)) > MAX_FOLDER_CHARS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="octavo-", dir="/tmp"))
    return folder


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
