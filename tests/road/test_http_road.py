"""The real model over HTTP: crowds, cut connections, memory given back, waste known."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]


async def complete(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], cut: int | None
) -> int:
    """Stream a completion; hang up after ``cut`` events. Returns the number of events read."""
    events = 0
    async with client.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            if line == "data: [DONE]":
                return events
            assert "error" not in json.loads(line[5:])
            events += 1
            if cut is not None and events >= cut:
                return events
    assert cut is not None, "the stream ended without [DONE]"
    return events


async def crowd(
    url: str, bodies: list[tuple[dict[str, Any], int | None]], concurrency: int
) -> None:
    limit = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=concurrency)) as client:

        async def one(body: dict[str, Any], cut: int | None) -> None:
            async with limit:
                events = await complete(client, url, body, cut)
                assert events >= 1 if cut != 0 else events == 1

        await asyncio.gather(*(one(body, cut) for body, cut in bodies))


def test_two_hundred_requests_a_third_cut_off_leave_nothing_behind(server: Any) -> None:
    rng = random.Random(7)
    bodies = []
    for i in range(200):
        body = {
            "prompt": [rng.randrange(17, 49152) for _ in range(rng.choice([3, 20, 60, 150, 300]))],
            "max_tokens": rng.choice([4, 16, 48]),
            "temperature": rng.choice([0, 1]),
            "ignore_eos": True,
            "stream": True,
        }
        bodies.append((body, rng.randrange(1, 10) if i % 3 == 0 else None))
    asyncio.run(crowd(server.url, bodies, 64))
    server.wait_idle()
    assert server.process.poll() is None
    assert server.metric("vllm:request_success_total", finished_reason="length") >= 133
    assert server.metric("vllm:request_success_total", finished_reason="abort") > 0
    total = server.metric("octavo:kv_blocks_total")
    assert server.metric("octavo:kv_blocks_free") == total


def test_waste_is_under_four_percent_with_prompts_of_two_hundred_tokens(server: Any) -> None:
    rng = random.Random(8)
    names = ("octavo:kv_slot_steps_allocated_total", "octavo:kv_slot_steps_used_total")
    before = [server.metric(name) for name in names]
    bodies: list[tuple[dict[str, Any], int | None]] = [
        (
            {
                "prompt": [rng.randrange(17, 49152) for _ in range(rng.randint(200, 420))],
                "max_tokens": rng.randint(16, 64),
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            },
            None,
        )
        for _ in range(40)
    ]
    asyncio.run(crowd(server.url, bodies, 16))
    server.wait_idle()
    allocated, used = (server.metric(n) - b for n, b in zip(names, before, strict=True))
    assert 0 < used <= allocated
    assert (allocated - used) / allocated < 0.04
