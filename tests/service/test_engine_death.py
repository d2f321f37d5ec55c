"""A server whose engine process is killed, with a real engine on a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = pytest.mark.slow

NUM_KILLS = int(os.environ.get("OCTAVO_TEST_KILLS", "8"))
COMMON = {"max_tokens": 300, "ignore_eos": True, "stream_options": {"include_usage": True}}
STREAMED: list[dict[str, Any]] = [
    {"prompt": [1, 2, 3], "temperature": 0},
    {"prompt": [4] * 40, "seed": 5},
    {"prompt": [5, 6], "seed": 6, "n": 3, "logprobs": 2},
    {"prompt": [9] * 7, "seed": 7, "frequency_penalty": 1.5, "repetition_penalty": 1.2},
    {"prompt": [8, 9], "seed": -3, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
    {"prompt": list(range(20)), "seed": 1, "echo": True, "logprobs": 1},
    {"prompt": [2, 2], "seed": 3, "min_tokens": 250, "stop": ["e", "t", "a"]},
    {"prompt": [[7, 7], [7, 8]], "temperature": 0, "logit_bias": {"40": 2}},
]
WHOLE: list[dict[str, Any]] = [
    {"prompt": list(range(99)), "seed": 1, "prompt_logprobs": 1, "max_tokens": 300},
    {"prompt": [3, 1], "seed": 2, "n": 2, "best_of": 4, "logprobs": 1},
    {"prompt": [3, 2], "n": 2, "use_beam_search": True, "temperature": 0, "max_tokens": 60},
]


@pytest.fixture
def server(start_server: Callable[..., Any], tiny_model: Path) -> Iterator[Any]:
    flags = ["--check-invariants", "--enable-debug-endpoints", "--num-gpu-blocks-override", "400"]
    with start_server(str(tiny_model), *flags) as running:
        yield running


def engine_of(server: Any) -> psutil.Process:
    (engine,) = psutil.Process(server.process.pid).children()
    assert engine.name() == "octavo-engine"
    return engine


async def until_ready_is(status: int, url: str, client: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + 60
    while (await client.get(f"{url}/ready")).status_code != status:
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


class Stream:
    """One streamed completion: texts, log-probabilities and ends by choice, and the usage."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.url, self.body = url, {**COMMON, **body, "stream": True}
        self.texts: dict[int, str] = {}
        self.tokens: dict[int, list[Any]] = {}
        self.ends: dict[int, str] = {}
        self.usage: dict[str, Any] = {}
        self.error: Any = None
        self.begun = asyncio.Event()

    async def read(self, client: httpx.AsyncClient) -> Stream:
        async with client.stream("POST", f"{self.url}/v1/completions", json=self.body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))
        return self

    def _take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error") or self.error
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice.get("logprobs"):
                told = choice["logprobs"]
                pairs = zip(told["tokens"], told["token_logprobs"], strict=True)
                self.tokens.setdefault(index, []).extend(pairs)
            if choice["finish_reason"]:
                self.ends[index] = choice["finish_reason"]
            if choice["text"]:
                self.begun.set()

    @property
    def answer(self) -> tuple[Any, ...]:
        usage = {name: self.usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
        return self.texts, self.tokens, self.ends, usage, self.error


async def ask_all(
    url: str, client: httpx.AsyncClient, then: Callable[[list[Stream]], Any] | None = None
) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """Every request at the same time. ``then`` is awaited meanwhile, with the streams."""
    streams = [Stream(url, body) for body in STREAMED]
    reading = [asyncio.create_task(stream.read(client)) for stream in streams]
    posts = [
        asyncio.create_task(client.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}))
        for body in ({"max_tokens": 200, **one} for one in WHOLE)
    ]
    embedding = asyncio.create_task(
        client.post(f"{url}/v1/embeddings", json={"input": [[5] * 300, [6, 7]]})
    )
    if then is not None:
        await then(streams)
    await asyncio.gather(*reading)
    answers = [(await post).json()["choices"] for post in posts]
    vectors = [entry["embedding"] for entry in (await embedding).json()["data"]]
    return [stream.answer for stream in streams], [*answers, vectors]


def test_every_kind_of_request_is_answered_as_if_nothing_had_happened(server: Any) -> None:
    url = server.url

    async def kill(streams: list[Stream]) -> None:
        await asyncio.gather(*(asyncio.wait_for(stream.begun.wait(), 60) for stream in streams))
        engine_of(server).kill()

    async def scene() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            undisturbed = await ask_all(url, client)
            disturbed = await ask_all(url, client, kill)
            for one, other in zip(disturbed[0], undisturbed[0], strict=True):
                assert one == other
            assert disturbed[1] == undisturbed[1]

    asyncio.run(scene())
    server.wait_idle()
    assert server.metric("octavo:engine_restarts_total") == 1
    num_choices = 2 * (len(STREAMED) + 1 + len(WHOLE) + 2)  # requests of the engine
    assert server.metric("vllm:request_success_total") == num_choices
    assert server.metric("vllm:request_success_total", finished_reason="error") == 0


def test_counters_never_fall_and_add_up(server: Any) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "octavo:steps_total")
    seen: list[list[float]] = []

    async def kill(streams: list[Stream]) -> None:
        await asyncio.gather(*(asyncio.wait_for(stream.begun.wait(), 60) for stream in streams))
        engine_of(server).kill()

    async def scene() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            streams = [Stream(server.url, body) for body in STREAMED[:6]]
            reading = [asyncio.create_task(stream.read(client)) for stream in streams]
            await kill(streams)
            while not all(task.done() for task in reading):
                seen.append([server.metric(name) for name in names])
                await asyncio.sleep(0.05)
            usages = [(await task).usage for task in reading]
            server.wait_idle()
            seen.append([server.metric(name) for name in names])
            assert seen == sorted(seen)
            assert seen[-1][0] == sum(usage["prompt_tokens"] for usage in usages)
            assert seen[-1][1] == sum(usage["completion_tokens"] for usage in usages)

    asyncio.run(scene())


@pytest.mark.parametrize("seed", [0])
def test_kills_at_random_moments_change_no_stream(server: Any, seed: int) -> None:
    """Each kill comes after every stream has gained some text since the one before."""
    chance = random.Random(seed)
    bodies = [{"prompt": [i + 1, 30 + i], "seed": i, "max_tokens": 480} for i in range(16)]

    async def kill(client: httpx.AsyncClient, streams: list[Stream]) -> int:
        for number in range(NUM_KILLS):
            await until_ready_is(200, server.url, client)
            for stream in streams:
                stream.begun.clear()
            waits = [asyncio.wait_for(stream.begun.wait(), 60) for stream in streams]
            await asyncio.gather(*waits)
            await asyncio.sleep(chance.uniform(0, 0.1))
            if any(stream.ends for stream in streams):
                return number
            engine_of(server).kill()
            await until_ready_is(503, server.url, client)
        return NUM_KILLS

    async def ask(client: httpx.AsyncClient) -> tuple[list[Any], list[asyncio.Task[Stream]]]:
        streams = [Stream(server.url, body) for body in bodies]
        return streams, [asyncio.create_task(stream.read(client)) for stream in streams]

    async def scene() -> None:
        front_end = psutil.Process(server.process.pid)
        async with httpx.AsyncClient(timeout=120) as client:
            twins, reading = await ask(client)
            await asyncio.gather(*reading)
            num_fds, num_threads = front_end.num_fds(), front_end.num_threads()
            streams, reading = await ask(client)
            num_kills = await kill(client, streams)
            await asyncio.gather(*reading)
            assert num_kills >= 4
            assert [stream.answer for stream in streams] == [twin.answer for twin in twins]
            assert server.metric("octavo:engine_restarts_total") == num_kills
            server.wait_idle()
            assert front_end.num_fds() <= num_fds + 1  # the connection that asks
            assert front_end.num_threads() <= num_threads + 1

    asyncio.run(scene())
    asked = server.metric("vllm:generation_tokens_total")
    assert asked == 2 * 16 * 480


def test_what_routes_say_while_the_engine_is_started_again(server: Any) -> None:
    ask = {"prompt": [1, 2], "max_tokens": 3, "temperature": 0}
    before = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=60).json()["choices"]
    engine_of(server).kill()
    deadline = time.monotonic() + 30
    while (ready := httpx.get(f"{server.url}/ready")).status_code == 200:
        assert time.monotonic() < deadline
    assert ready.status_code == 503
    assert ready.json()["error"]["code"] == "engine_not_ready"
    assert ready.json()["stage"] in ("restarting", "starting", "loading")
    assert ready.json()["progress"] < 1
    assert "retry-after" in ready.headers
    assert httpx.get(f"{server.url}/health").status_code == 200
    debug = httpx.get(f"{server.url}/debug/kv")
    assert debug.status_code == 503
    assert "started again" in debug.json()["error"]["message"]
    answer = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=60)
    assert answer.json()["choices"] == before
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_sigterm_while_the_engine_is_started_again_ends_properly(server: Any) -> None:
    engine_of(server).kill()
    deadline = time.monotonic() + 30
    while httpx.get(f"{server.url}/ready").status_code == 200:
        assert time.monotonic() < deadline
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
