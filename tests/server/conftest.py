"""A fake engine and clients over it, so that the server is tested without a model."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from octavo.engine.api import (
    ChatPrompt,
    CompletionOutput,
    Engine,
    EngineInfo,
    FinishReason,
    GenerationRequest,
    KVBlock,
    KVSequence,
    KVSnapshot,
    LoadProgress,
    Logprob,
    PoolingParams,
    Prompt,
    RenderedRequest,
    RequestOutput,
    RequestStream,
    TextPrompt,
    TokensPrompt,
)
from octavo.engine.config.server_config import ServerConfig
from octavo.engine.errors import EngineDeadError, EngineNotReadyError, InvalidRequestError
from octavo.engine.stats import EngineStats, StatsSink
from octavo.server.app import create_app
from octavo.server.listening import bind
from octavo.server.protocol import HeaderLimitProtocol

INFO = EngineInfo(
    model="/models/tiny",
    architecture="LlamaForCausalLM",
    max_model_len=64,
    vocab_size=100,
    eos_token_ids=(2,),
    block_size=16,
    num_blocks=10,
    kv_cache_bytes=1 << 20,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    dtype="float32",
    device="cpu",
    attention_backend="torch",
    num_threads=2,
    num_parameters=135_000_000,
    load_s=1.5,
)


SNAPSHOT = KVSnapshot(
    num_blocks=2,
    block_size=16,
    blocks=(KVBlock(0, 2, 16, True, (4, 5)), KVBlock(1, 0, 0, False, ())),
    sequences=(KVSequence("r", 4, "running", 16, (0,)), KVSequence("r", 5, "waiting", 16, (0,))),
)


def entry(token_id: int, count: int) -> dict[int, Logprob]:
    """A token's own log-probability, -3, and those of tokens 1, 2, ...: -1, -2, ..."""
    found = {token_id: Logprob(-3.0, 3, chr(token_id), chr(token_id).encode())}
    for i in range(1, count + 1):
        found.setdefault(i, Logprob(-float(i), i, f"t{i}", b"t%d" % i))
    return found


class FakeStream(RequestStream):
    """Plays the engine's pieces, one token each; ranked choices come whole, at the end."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest, ids: list[int]) -> None:
        self._request_id, self._prompt_token_ids = request.request_id, ids
        self._engine = engine
        self._request = request
        self._num_chars = 0
        self._sampling = request.sampling
        limit = request.sampling.max_tokens
        self._left = list(engine.pieces[:limit])
        self._end = FinishReason.STOP if limit is None or limit > len(self._left) else None
        self.is_aborted = False
        self.finished = False
        self._has_turn = False

    @property
    def request_id(self) -> str:
        return self._request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._prompt_token_ids

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        if self._is_held:
            await self._engine.released.wait()
        return self._next()

    @property
    def _is_held(self) -> bool:
        return len(self._left) <= self._engine.hold_at and not self._engine.released.is_set()

    def take(self) -> RequestOutput | None:
        if self.finished or self._is_held or (self._engine.is_paced and not self._has_turn):
            return None
        self._has_turn = False
        return self._next()

    def on_ready(self, callback: Callable[[], None]) -> None:
        self._telling = asyncio.ensure_future(self._tell(callback))

    async def _tell(self, callback: Callable[[], None]) -> None:
        while not self.finished and not self.is_aborted:
            if self._is_held:
                await self._engine.released.wait()
            self._has_turn = True
            callback()
            self._has_turn = False
            await asyncio.sleep(0)

    def _next(self) -> RequestOutput:
        if self._engine.death is not None:
            raise EngineDeadError(self._engine.death)
        if self._sampling.use_beam_search or self._sampling.is_best_of:
            return self._ranked()
        if self._engine.is_closed:
            return self._output("", [], FinishReason.ABORT)
        if self._request.pooling is not None:
            return self._embedded(self._request.pooling)
        if len(self._left) == 1 and self._engine.error is not None:
            return self._output("", [], FinishReason.ERROR)
        text = self._left.pop(0) if self._left else ""
        reason = None if self._left else self._end or FinishReason.LENGTH
        return self._output(text, [7], reason)

    def _embedded(self, pooling: PoolingParams) -> RequestOutput:
        """A vector that tells the prompt's ids, its first two numbers the most telling ones."""
        if self._engine.error is not None:
            return self._output("", [], FinishReason.ERROR)
        output = self._output("", [], FinishReason.STOP)
        ids = self.prompt_token_ids
        numbers = [ids[-1] / 7, sum(ids) / len(ids), 0.1, -1e-30][: pooling.dimensions]
        output.embedding = struct.pack(f"<{len(numbers)}f", *numbers)
        return output

    def _ranked(self) -> RequestOutput:
        """``n`` choices with equal texts, each less likely than the one before."""
        self.finished, sampling = True, self._sampling
        text, ids = "".join(self._left), [7] * len(self._left)
        outputs = [
            CompletionOutput(i, text, ids, -1.5 - i, finish_reason=FinishReason.LENGTH)
            for i in range(sampling.n)
        ]
        num_discarded = (sampling.num_sequences - sampling.n) * len(ids)
        prompt_ids = self.prompt_token_ids
        return RequestOutput(self.request_id, None, prompt_ids, outputs, True, 3, num_discarded)

    def _output(self, text: str, ids: list[int], reason: FinishReason | None) -> RequestOutput:
        self.finished = reason is not None
        stop_reason = "END" if reason is FinishReason.STOP else None
        output = CompletionOutput(0, text, ids, finish_reason=reason, stop_reason=stop_reason)
        if self._sampling.logprobs is not None:
            output.logprobs = [entry(token_id, self._sampling.logprobs) for token_id in ids]
            output.text_offsets = [self._num_chars] * len(ids)
            self._num_chars += len(text)
        prompt_ids, error = self.prompt_token_ids, self._engine.error
        whole = RequestOutput(
            self.request_id, None, prompt_ids, [output], self.finished, 3, error=error
        )
        count = self._sampling.prompt_logprobs
        if count is not None:
            whole.prompt_logprobs = [None, *(entry(one, count) for one in prompt_ids[1:])]
        if self._request.echo:
            whole.prompt = "".join(map(chr, prompt_ids))
            whole.prompt_text_offsets = list(range(len(prompt_ids)))
            whole.first_prompt_token = chr(prompt_ids[0]).encode()
        return whole

    def abort(self) -> None:
        self.is_aborted = True


class FakeEngine(Engine):
    """Answers every request with ``pieces``; can load, fail, wait and die."""

    def __init__(self) -> None:
        self.pieces = ["Hel", "lo", " 🌶\n"]
        self.is_ready, self.is_closed = True, False
        self.is_restarting = False  # requests are accepted, and wait
        self.restarts = 0
        self.death: str | None = None
        self.error: str | None = None  # streams end with FinishReason.ERROR
        self.hold_at = -1  # streams wait while that many pieces, or fewer, are left
        self.is_paced = False  # whoever takes has to be told first
        self.released = asyncio.Event()
        self.dead = asyncio.Event()
        self.requests: list[GenerationRequest] = []
        self.streams: list[FakeStream] = []
        self.default_sampling: dict[str, Any] = {}
        self.sink: StatsSink | None = None
        self.num_resets = 0

    async def start(self) -> None:
        pass

    @property
    def info(self) -> EngineInfo:
        if not self.is_ready:
            raise EngineNotReadyError("The model is still loading.")
        fields = {name: getattr(INFO, name) for name in INFO.__slots__}
        return EngineInfo(**{**fields, "default_sampling": self.default_sampling})

    @property
    def progress(self) -> LoadProgress:
        if self.is_restarting:
            return LoadProgress("restarting", 0.0)
        return LoadProgress("ready", 1.0) if self.is_ready else LoadProgress("loading", 0.25)

    def check_ready(self) -> None:
        self.check_accepting()
        if self.is_restarting:
            raise EngineNotReadyError("The engine is being started again.")

    def check_accepting(self) -> None:
        self.check_alive()
        _ = self.info

    @property
    def num_restarts(self) -> int:
        return self.restarts

    def check_alive(self) -> None:
        if self.death is not None:
            raise EngineDeadError(self.death)

    async def submit(self, requests: Sequence[GenerationRequest]) -> Sequence[RequestStream]:
        self.check_accepting()
        ids = [_prompt_ids(request.prompt) for request in requests]
        self.requests += requests
        streams = [FakeStream(self, r, i) for r, i in zip(requests, ids, strict=True)]
        self.streams += streams
        return streams

    def stats(self) -> EngineStats | None:
        return None

    def set_stats_sink(self, sink: StatsSink) -> None:
        self.sink = sink

    async def render(self, requests: Sequence[GenerationRequest]) -> list[RenderedRequest]:
        self.check_ready()
        return [
            RenderedRequest(r.request_id, None, _prompt_ids(r.prompt), r.sampling) for r in requests
        ]

    async def tokenize(self, prompt: Prompt) -> list[int]:
        self.check_ready()
        return _prompt_ids(prompt)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        self.check_ready()
        return "".join(map(chr, _checked_ids("tokens", token_ids)))

    async def vocabulary_entries(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<{token_id}>" for token_id in token_ids]

    def tokenizer_info(self) -> Mapping[str, Any]:
        return {"tokenizer_class": "Fake", "chat_template": "{{ messages }}"}

    async def kv_snapshot(self) -> KVSnapshot:
        self.check_ready()
        return SNAPSHOT

    async def reset_prefix_cache(self) -> None:
        self.check_ready()
        self.num_resets += 1

    def die(self, reason: str) -> None:
        self.death = reason
        self.dead.set()
        self.released.set()

    async def wait_dead(self) -> None:
        await self.dead.wait()

    async def close(self) -> None:
        self.is_closed = True
        self.released.set()


def _checked_ids(param: str, token_ids: Sequence[int]) -> list[int]:
    for token_id in token_ids:
        if not 0 <= token_id < INFO.vocab_size:
            raise InvalidRequestError(f"Token id {token_id} is out of range.", param=param)
    return list(token_ids)


def _prompt_ids(prompt: Prompt) -> list[int]:
    if isinstance(prompt, TokensPrompt):
        return _checked_ids("prompt", prompt.token_ids)
    if isinstance(prompt, TextPrompt):
        return [ord(char) for char in prompt.text]
    assert isinstance(prompt, ChatPrompt)
    return [ord(char) for message in prompt.messages for char in message["content"]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def _client(engine: Engine, config: ServerConfig) -> httpx.AsyncClient:
    app = create_app(engine, config, ("tiny", "alias/one"))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://octavo")


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """Speaks to the application directly."""
    async with _client(engine, ServerConfig()) as client:
        yield client


@pytest.fixture
async def guarded(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """The same behind two API keys."""
    async with _client(engine, ServerConfig(api_key=("first", "schlüssel"))) as client:
        yield client


@pytest.fixture
async def debugged(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """The application with its debug routes, behind a key."""
    config = ServerConfig(api_key=("first",), enable_debug_endpoints=True)
    async with _client(engine, config) as client:
        yield client


@asynccontextmanager
async def listening(engine: Engine, **options: Any) -> AsyncIterator[str]:
    """A real server on a real socket."""
    server_config = ServerConfig(**options)

    class Protocol(HeaderLimitProtocol):
        head_timeout_s = server_config.client_stall_timeout

    app = create_app(engine, server_config, ("tiny", "alias/one"))
    config = uvicorn.Config(app, http=Protocol, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    listener = bind("127.0.0.1", 0)  # accepts before the server has started
    task = asyncio.create_task(server._serve([listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = server.force_exit = True
    await task


@pytest.fixture
async def url(engine: FakeEngine) -> AsyncIterator[str]:
    """A real server on a real socket."""
    async with listening(engine) as url:
        yield url
