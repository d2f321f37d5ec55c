"""The embedded model, and an engine process that is killed or stands still under running streams."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_KILLS = int(os.environ.get("OCTAVO_TEST_KILLS", "8"))
NUM_TOKENS = 32
SUBJECTS = ("Water boils at", "The capital of France is", "def fibonacci(n):", "1, 2, 3, 4, 5,")
SEEDED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3}
BODIES: list[dict[str, Any]] = [
    *({"prompt": prompt, "temperature": 0} for prompt in SUBJECTS),
    *({"prompt": f"Once upon a time, {i} cats", "seed": i, **SEEDED} for i in range(4)),
]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], model_path: Any) -> Iterator[Any]:
    with start_server("--check-invariants", "--engine-heartbeat-timeout", "10") as running:
        yield running


class Stream:
    """The text of one completion, as it comes."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.url = url
        self.body = {"max_tokens": NUM_TOKENS, **body, "ignore_eos": True, "stream": True}
        self.text = ""
        self.events: list[Any] = []
        self.begun = asyncio.Event()

    async def read(self, client: httpx.AsyncClient) -> str:
        async with client.stream("POST", f"{self.url}/v1/completions", json=self.body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))
        assert line == "data: [DONE]" or not line
        assert self.events[-1]["choices"][0]["finish_reason"] == "length"
        return self.text

    def _take(self, event: Any) -> None:
        assert "error" not in event
        self.events.append(event)
        text = "".join(choice["text"] for choice in event["choices"])
        if text:
            self.text += text
            self.begun.set()

    @property
    def has_ended(self) -> bool:
        return any(choice["finish_reason"] for choice in self.events[-1]["choices"])


async def stream_all(url: str, hurt: Callable[[], None] | None = None) -> list[str]:
    """The texts; ``hurt`` is called when every stream has gained some."""
    async with httpx.AsyncClient(timeout=300) as client:
        streams = [Stream(url, body) for body in BODIES]
        reading = [asyncio.create_task(stream.read(client)) for stream in streams]
        if hurt is not None:
            for stream in streams:
                await asyncio.wait_for(stream.begun.wait(), 120)
            hurt()
        return await asyncio.gather(*reading)


def engine_of(server: Any) -> psutil.Process:
    (engine,) = psutil.Process(server.process.pid).children()
    return engine


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_each_stream_is_complete_and_equal_to_its_undisturbed_twin(
    server: Any, number: signal.Signals
) -> None:
    num_restarts = server.metric("octavo:engine_restarts_total")
    num_generated = server.metric("vllm:generation_tokens_total")
    undisturbed = asyncio.run(stream_all(server.url))

    def hurt() -> None:
        engine_of(server).send_signal(number)

    disturbed = asyncio.run(stream_all(server.url, hurt))
    assert disturbed == undisturbed
    assert len(set(disturbed)) == len(BODIES)
    assert server.metric("octavo:engine_restarts_total") == num_restarts + 1
    server.wait_idle()
    gained = server.metric("vllm:generation_tokens_total") - num_generated
    assert gained == 2 * len(BODIES) * NUM_TOKENS


SIXTEEN: list[dict[str, Any]] = [
    {"prompt": f"{number}. A story of {number} cats", "seed": number, "max_tokens": 64, **SEEDED}
    for number in range(16)
]


async def until_ready_is(status: int, url: str, client: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + 60
    while (await client.get(f"{url}/ready")).status_code != status:
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


async def kill_often(
    server: Any, client: httpx.AsyncClient, streams: list[Stream], most: int, chance: random.Random
) -> int:
    """Kill the engine until a stream has ended, each time after all of them have gained some text."""
    for number in range(most):
        await until_ready_is(200, server.url, client)
        for stream in streams:
            stream.begun.clear()
        await asyncio.gather(*(asyncio.wait_for(stream.begun.wait(), 120) for stream in streams))
        await asyncio.sleep(chance.uniform(0, 0.2))
        if any(stream.has_ended for stream in streams):
            return number
        engine_of(server).kill()
        await until_ready_is(503, server.url, client)
    return most


def test_no_client_sees_anything_of_kills_at_random_moments(server: Any) -> None:
    """Every stream is complete and equal to its undisturbed twin, and the counters add up."""
    chance = random.Random(0)
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
    counts = [[server.metric(name) for name in names]]
    num_restarts = server.metric("octavo:engine_restarts_total")

    async def scene() -> int:
        num_kills, num_sets = 0, 1
        async with httpx.AsyncClient(timeout=300) as client:
            twins = [Stream(server.url, body) for body in SIXTEEN]
            expected = await asyncio.gather(*(twin.read(client) for twin in twins))
            assert len(set(expected)) == len(SIXTEEN)
            server.wait_idle()
            counts.append([server.metric(name) for name in names])
            while num_kills < NUM_KILLS:
                streams = [Stream(server.url, body) for body in SIXTEEN]
                reading = [asyncio.create_task(stream.read(client)) for stream in streams]
                gained = await kill_often(server, client, streams, NUM_KILLS - num_kills, chance)
                assert await asyncio.gather(*reading) == expected
                assert gained, "streams end before the engine can be killed once"
                num_kills, num_sets = num_kills + gained, num_sets + 1
        return num_sets

    num_sets = asyncio.run(scene())
    server.wait_idle()
    assert server.metric("octavo:engine_restarts_total") == num_restarts + NUM_KILLS
    counts.append([server.metric(name) for name in names])
    undisturbed, gained = ([b - a for a, b in zip(counts[0], c, strict=True)] for c in counts[1:])
    assert undisturbed[0] == sum(body["max_tokens"] for body in SIXTEEN)
    assert gained == [num_sets * number for number in undisturbed]
