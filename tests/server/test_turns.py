"""Of many requests that come together, one is admitted in a turn of the event loop."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from octavo.server.turns import PER_TURN, TurnMiddleware, Turns
from tests.server.conftest import listening

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio


async def test_turns_come_in_order_with_a_turn_of_the_loop_between() -> None:
    turns, seen = Turns(), list[tuple[int, int]]()
    ticks = 0
    loop = asyncio.get_running_loop()

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if len(seen) < num_takers:
            loop.call_soon(tick)

    num_takers = 3 * PER_TURN

    async def take(number: int) -> None:
        await turns.take()
        seen.append((number, ticks))

    tick()
    await asyncio.gather(*(take(number) for number in range(num_takers)))
    assert [number for number, _ in seen] == list(range(num_takers))
    assert sorted(Counter(when for _, when in seen).values()) == [PER_TURN] * 3
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert turns._num_free == PER_TURN


async def test_a_turn_that_nobody_wants_any_more_is_passed_over() -> None:
    turns = Turns()
    for _ in range(PER_TURN):
        await turns.take()
    waiting = [asyncio.create_task(turns.take()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    waiting[1].cancel()
    async with asyncio.timeout(5):
        await waiting[2]


@pytest.mark.parametrize("is_body_late", [False, True])
async def test_requests_begin_and_go_on_one_in_a_turn(is_body_late: bool) -> None:
    loop, num_requests = asyncio.get_running_loop(), 5 * PER_TURN
    tick, begun, read = 0, list[int](), list[int]()
    bodies = asyncio.Event()

    def count() -> None:
        nonlocal tick
        tick += 1
        if len(read) < num_requests:
            loop.call_soon(count)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(tick)
        if len(begun) == num_requests:
            bodies.set()
        await receive()
        read.append(tick)

    async def receive() -> Message:
        if is_body_late:
            await bodies.wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        raise NotImplementedError

    count()
    middleware = TurnMiddleware(app)
    scope: Scope = {"type": "http", "method": "POST"}
    requests = [asyncio.create_task(middleware(scope, receive, send)) for _ in range(num_requests)]
    await asyncio.gather(*requests)
    assert max(Counter(begun).values()) == PER_TURN
    assert max(Counter(read).values()) <= (PER_TURN + 1 if is_body_late else PER_TURN)
    if not is_body_late:
        assert read == begun  # nothing waits twice


async def test_a_request_without_a_body_waits_for_nobody() -> None:
    begun = list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["method"])

    async def receive() -> Message:
        raise NotImplementedError

    async def send(message: Message) -> None:
        raise NotImplementedError

    middleware = TurnMiddleware(app)
    methods = ["POST"] * 3 * PER_TURN + ["GET"]
    crowd = [middleware({"type": "http", "method": method}, receive, send) for method in methods]
    await asyncio.gather(*crowd)
    assert begun.index("GET") <= PER_TURN
    assert len(begun) == len(methods)


async def test_a_probe_does_not_wait_for_a_crowd_to_be_admitted(engine: FakeEngine) -> None:
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 3}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    ask = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    async with listening(engine) as url, asyncio.timeout(30):
        port = urlsplit(url).port
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")  # all are connected
        await reader.readuntil(b"}")
        for _, one in crowd:
            one.write(ask)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert len(engine.requests) < 30
        answers = await asyncio.gather(*(one.read(-1) for one, _ in crowd))
        for _, one in [*crowd, (reader, writer)]:
            one.close()
    assert len(engine.requests) == 60
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
