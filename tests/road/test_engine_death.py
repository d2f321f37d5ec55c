"""The embedded model, and an engine process that is killed or stands still under running streams."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

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
        self.body = {**body, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        self.text = ""
        self.events: list[Any] = []
        self.begun = asyncio.Event()

    async def read(self, client: httpx.AsyncClient) -> str:
        async with client.stream("POST", f"{self.url}/v1/completions", json=self.body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event
                    self.events.append(event)
                    self.text += "".join(choice["text"] for choice in event["choices"])
                    if self.text:
                        self.begun.set()
        assert line == "data: [DONE]" or not line
        assert self.events[-1]["choices"][0]["finish_reason"] == "length"
        return self.text


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_each_stream_is_complete_and_equal_to_its_undisturbed_twin(
    server: Any, number: signal.Signals
) -> None:
    num_restarts = server.metric("octavo:engine_restarts_total")
    num_generated = server.metric("vllm:generation_tokens_total")
    undisturbed = asyncio.run(stream_all(server.url))

    def hurt() -> None:
        (engine,) = psutil.Process(server.process.pid).children()
        engine.send_signal(number)

    disturbed = asyncio.run(stream_all(server.url, hurt))
    assert disturbed == undisturbed
    assert len(set(disturbed)) == len(BODIES)
    assert server.metric("octavo:engine_restarts_total") == num_restarts + 1
    server.wait_idle()
    gained = server.metric("vllm:generation_tokens_total") - num_generated
    assert gained == 2 * len(BODIES) * NUM_TOKENS
