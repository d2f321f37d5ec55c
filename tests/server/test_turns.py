"""Of many requests that come together, one is taken in in a turn of the event loop."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from uvicorn.server import ServerState

from octavo.server.protocol import HeaderLimitProtocol
from octavo.server.turns import PER_TURN, Turns
from tests.server.conftest import listening

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio


ASK = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"


class FakeTransport(asyncio.Transport):
    """A connection whose other side is the test."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read = True
        self.is_closed = False

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def write(self, data: Any) -> None:
        raise AssertionError(data)


class Connections:
    """Connections of one server, and in which turns of the loop what came on them was seen."""

    def __init__(self, count: int) -> None:
        self.begun: list[tuple[str, int]] = []
        self.read: list[tuple[str, int]] = []
        self.turn = 0
        self.faults: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.faults.append(context))
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            http=HeaderLimitProtocol,
            ws="none",
            log_config=None,
            proxy_headers=False,
        )
        config.load()
        state = ServerState()
        self.all = [HeaderLimitProtocol(config, state, {}) for _ in range(count)]
        self.transports = [FakeTransport() for _ in self.all]
        for one, transport in zip(self.all, self.transports, strict=True):
            one.connection_made(transport)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"]
        self.begun.append((name, self.turn))
        while (await receive()).get("more_body"):
            pass
        self.read.append((name, self.turn))
        await asyncio.Event().wait()

    async def run(self, num_turns: int) -> None:
        for _ in range(num_turns):
            await asyncio.sleep(0)
            self.turn += 1

    def end(self) -> None:
        for one in self.all:
            if one.parser is not None:
                one.connection_lost(ConnectionError())
            for task in one.tasks:
                task.cancel()


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    made = Connections(5 * PER_TURN)
    yield made
    made.end()
    assert not made.faults


async def test_turns_come_in_order_with_a_turn_of_the_loop_between() -> None:
    turns, seen = Turns(), list[tuple[int, int]]()
    ticks, num_callers = 0, 3 * PER_TURN
    loop = asyncio.get_running_loop()

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if len(seen) < num_callers:
            loop.call_soon(tick)

    tick()

    def note(number: int) -> None:
        seen.append((number, ticks))

    for number in range(num_callers):
        turns.call(partial(note, number))
    assert len(seen) == PER_TURN
    await asyncio.sleep(0.01)
    assert [number for number, _ in seen] == list(range(num_callers))
    assert sorted(Counter(when for _, when in seen).values()) == [PER_TURN] * 3
    assert turns._num_free == PER_TURN


async def test_a_call_that_fails_takes_nobodys_turn() -> None:
    turns, seen = Turns(), list[int]()
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: faults.append(context["exception"])
    )

    def fail() -> None:
        raise ConnectionError

    for number in range(2 * PER_TURN):
        turns.call(partial(seen.append, number))
    for number in range(2 * PER_TURN, 4 * PER_TURN):
        turns.call(fail)
        turns.call(partial(seen.append, number))
    await asyncio.sleep(0.01)
    assert seen == list(range(4 * PER_TURN))
    assert len(faults) == 2 * PER_TURN


@pytest.mark.parametrize("is_body_late", [False, True])
async def test_requests_are_taken_in_one_in_a_turn(
    connections: Connections, is_body_late: bool
) -> None:
    for one in connections.all:
        one.data_received(ASK if is_body_late else ASK + b"{}")
    held = [not one.is_read for one in connections.transports]
    assert held == [False] * PER_TURN + [True] * (len(held) - PER_TURN)
    await connections.run(20)
    assert all(one.is_read for one in connections.transports)
    if is_body_late:
        assert len(connections.begun) == len(connections.all)
        assert not connections.read
        for one in connections.all:
            one.data_received(b"{}")
        await connections.run(20)
    for seen in (connections.begun, connections.read):
        assert len(seen) == len(connections.all)
        assert max(Counter(turn for _, turn in seen).values()) == PER_TURN


async def test_a_request_without_a_body_waits_for_nobody(connections: Connections) -> None:
    *crowd, probe = connections.all
    for one in crowd:
        one.data_received(ASK + b"{}")
    probe.data_received(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    await connections.run(2)
    assert "/health" in [name for name, _ in connections.begun[: PER_TURN + 1]]
    await connections.run(20)
    assert len(connections.begun) == len(connections.all)


async def test_what_comes_in_pieces_stays_in_order(connections: Connections) -> None:
    for one in connections.all:
        one.data_received(ASK[:7])
    await connections.run(20)
    assert all(one.is_read for one in connections.transports)
    for one in connections.all:
        one.data_received(ASK[7:20])
        one.data_received(ASK[20:])
        one.data_received(b"{}")
    await connections.run(20)
    assert len(connections.read) == len(connections.all)


async def test_what_is_held_does_not_grow(connections: Connections) -> None:
    """An answer on the same connection that ends, or is waited for, has the connection read again."""
    last, transport = connections.all[-1], connections.transports[-1]
    for one in connections.all:
        one.data_received(ASK)
    last.flow.resume_reading()
    last.data_received(b"{")
    is_read = transport.is_read
    assert not is_read
    await connections.run(20)
    is_read = transport.is_read
    assert is_read
    last.data_received(b"}")
    await connections.run(20)
    assert len(connections.read) == 1


async def test_a_head_that_is_held_is_not_late(connections: Connections) -> None:
    last = connections.all[-1]
    last.head_timeout_s = 60
    last.data_received(ASK[:20])
    await connections.run(5)
    for one in connections.all[:-1]:
        one.data_received(ASK + b"{}")
    last.data_received(ASK[20:] + b"{}")
    last._head_is_late()
    assert not connections.transports[-1].is_closed
    await connections.run(20)
    assert len(connections.begun) == len(connections.all)
    assert last._head_timer is None


async def test_who_goes_while_held_is_forgotten(connections: Connections) -> None:
    for one in connections.all:
        one.data_received(ASK + b"{}")
    connections.all[-2].connection_lost(None)
    await connections.run(20)
    assert len(connections.begun) == len(connections.all) - 1


async def test_who_is_held_is_neither_idle_nor_lost_at_the_end(connections: Connections) -> None:
    last = connections.all[-1]
    for one in connections.all:
        one.data_received(ASK + b"{}")
    assert last.timeout_keep_alive_task is None
    last.shutdown()
    assert not connections.transports[-1].is_closed
    await connections.run(20)
    assert len(connections.begun) == len(connections.all)


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
        assert len(engine.requests) < 10
        answers = await asyncio.gather(*(one.read(-1) for one, _ in crowd))
        for _, one in [*crowd, (reader, writer)]:
            one.close()
    assert len(engine.requests) == 60
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
