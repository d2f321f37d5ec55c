"""Clients that have stopped reading or sending are cut off; slow ones are not."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from octavo.server.stalls import CHECKS, LEAST_BYTES_S, _BodyReader, _Watch
from tests.server.conftest import listening

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
)


async def connected(url: str) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", urlsplit(url).port))
    return connection


@pytest.mark.anyio
async def test_a_client_that_never_reads_is_cut_off(engine: FakeEngine) -> None:
    engine.pieces = ["x" * 64_000] * 400  # more than the sockets hold
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 400}).encode()
    async with listening(engine, client_stall_timeout=0.2) as url, asyncio.timeout(20):
        with await connected(url) as connection:
            connection.send(f"{HEAD}{len(body)}\r\n\r\n".encode() + body)
            while not (engine.streams and engine.streams[0].is_aborted):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.anyio
async def test_a_body_that_stops_is_a_408(engine: FakeEngine) -> None:
    async with listening(engine, client_stall_timeout=0.2) as url, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(sock=await connected(url))
        writer.write(f'{HEAD}100\r\n\r\n{{"prompt": '.encode())
        answer = await reader.read(-1)  # to the connection's end
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"request_stalled" in answer
    assert engine.requests == []


async def answer_to(
    data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bytes:
    """Send byte by byte, far more often than a stall would take, until an answer comes."""
    for number in range(len(data)):
        writer.write(data[number : number + 1])
        try:
            return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 0.05)
        except TimeoutError:
            continue
    raise AssertionError("all of it has come")


@pytest.mark.anyio
@pytest.mark.parametrize("begins", ["with the head", "with the body"])
async def test_a_request_that_comes_byte_by_byte_is_a_408(engine: FakeEngine, begins: str) -> None:
    head = f"{HEAD}1000\r\n".encode()
    async with listening(engine, client_stall_timeout=0.5) as url, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(sock=await connected(url))
        if begins == "with the body":
            writer.write(head + b"\r\n")
        rest = head if begins == "with the head" else b" " * 1000
        answer = await answer_to(rest, reader, writer)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert (b"application/json" in answer) == (begins == "with the body")
    assert engine.requests == []


@pytest.mark.anyio
async def test_a_slow_body_has_more_time_the_more_of_it_has_come() -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * 4 * LEAST_BYTES_S, "more_body": True}

    reader = _BodyReader(receive, 3600.0)
    deadline = reader._deadline
    await reader()
    await reader()
    assert reader._deadline == deadline + 8


@pytest.mark.anyio
async def test_a_byte_between_two_requests_does_not_keep_a_connection(engine: FakeEngine) -> None:
    async with listening(engine, client_stall_timeout=0.3) as url, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(sock=await connected(url))
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.write(b"\r\n")
        rest = await reader.read(-1)  # to the connection's end
        writer.close()
    assert b"408" not in rest


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_connection_on_which_nothing_comes_ends_like_an_idle_one(
    engine: FakeEngine,
) -> None:
    async with listening(engine, client_stall_timeout=3600) as url, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(sock=await connected(url))
        assert await reader.read(-1) == b""  # after the 5 s of this server
        writer.close()


@pytest.mark.anyio
async def test_an_answer_may_take_longer_than_what_follows_it(engine: FakeEngine) -> None:
    """A second request's first bytes, sent meanwhile, do not end the first one's answer."""
    engine.hold_at = 1
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    async with listening(engine, client_stall_timeout=0.2) as url, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(sock=await connected(url))
        writer.write(f"{HEAD}{len(body)}\r\n\r\n".encode() + body)
        writer.write(b"GET /version HT")
        await asyncio.sleep(0.7)
        engine.released.set()
        answer = await reader.read(-1)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 408 " in answer


class Writer:
    """A connection with a given number of bytes in it."""

    is_open = False

    def __init__(self) -> None:
        self.num_unsent_bytes = 1000
        self.is_cut = False

    def write(self, data: bytes) -> None:
        raise NotImplementedError

    def cut(self) -> None:
        self.is_cut = True


@pytest.mark.anyio
async def test_whoever_reads_a_byte_now_and_then_stays() -> None:
    writer = Writer()
    watch = _Watch(writer, 3600.0)
    for _ in range(10):
        for _ in range(CHECKS):  # the first one of them sees that there are fewer
            watch._look()
        assert not writer.is_cut
        writer.num_unsent_bytes -= 1
    for _ in range(CHECKS + 1):
        watch._look()
    assert writer.is_cut
    watch.end()
