"""Clients that have stopped reading or sending are cut off; slow ones are not."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from octavo.server.stalls import CHECKS, _Watch
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
