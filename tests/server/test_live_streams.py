"""Streams over a real connection: sent without waiting where that can be, and kept apart from slow readers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

from octavo.server.protocol import Outbox
from octavo.server.streaming import BODY_WRITER, COMMENT, LiveEventStream

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
STREAMED = {"prompt": "a", "stream": True}


class Source:
    """Events put in by hand."""

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.is_last = False
        self.tell: Callable[[], None] = lambda: None

    @property
    def is_ended(self) -> bool:
        return self.is_last and not self.data

    def take(self) -> bytes:
        data, self.data = b"".join(self.data), []
        if b"broken" in data:
            raise ValueError("broken")
        return data

    def on_ready(self, callback: Callable[[], None]) -> None:
        self.tell = callback

    def put(self, *data: bytes, is_last: bool = False) -> None:
        self.data += data
        self.is_last = is_last
        self.tell()


class Connection:
    """An application's server: a :class:`BodyWriter` and the usual way, which both note what goes out."""

    def __init__(self) -> None:
        self.is_open = True
        self.sent: list[tuple[str, bytes]] = []
        self.times: list[float] = []  # of each
        self.is_closed = False
        self.takes_more = asyncio.Event()
        self.takes_more.set()
        self.gone = asyncio.Event()

    def write(self, data: bytes) -> None:
        self._note("at once", data)

    async def send(self, message: Any) -> None:
        await self.takes_more.wait()
        if message["type"] == "http.response.body":
            self._note("usual", message["body"])
            self.is_closed = not message["more_body"]

    def _note(self, way: str, data: bytes) -> None:
        self.sent.append((way, data))
        self.times.append(time.monotonic())

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}


@asynccontextmanager
async def answering(
    source: Source, connection: Connection, **options: Any
) -> AsyncIterator[asyncio.Task[None]]:
    closed: list[bool] = []
    answer = LiveEventStream(source, lambda: closed.append(True), **options)
    scope = {"type": "http", BODY_WRITER: connection}
    task = asyncio.ensure_future(answer(scope, connection.receive, connection.send))
    await settled()
    async with asyncio.timeout(5):
        yield task
        await asyncio.gather(task, return_exceptions=True)
    assert closed == [True]


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_event_leaves_in_the_call_that_brings_it() -> None:
    source, connection = Source(), Connection()
    async with answering(source, connection):
        source.put(b"one")
        assert connection.sent == [("at once", b"one")]
        source.put(b"two", b"three", is_last=True)
        assert connection.sent[-1] == ("at once", b"twothree")
        assert not connection.is_closed
    assert connection.sent[-1] == ("usual", b"")
    assert connection.is_closed


async def test_while_a_client_reads_slowly_events_stay_in_their_source() -> None:
    source, connection = Source(), Connection()
    async with answering(source, connection):
        connection.is_open = False
        connection.takes_more.clear()
        source.put(b"one")
        await settled()  # the task has it, and waits for the client
        source.put(b"two")
        source.put(b"three")
        assert connection.sent == []
        assert source.data == [b"two", b"three"]
        connection.is_open = (
            True  # the connection is ready, the task not yet at its turn: order is kept
        )
        source.put(b"four")
        assert connection.sent == []
        connection.takes_more.set()
        await settled()
        assert connection.sent == [("usual", b"one"), ("usual", b"twothreefour")]
        source.put(b"five", is_last=True)
        assert connection.sent[-1] == ("at once", b"five")


async def test_a_failure_of_the_source_is_the_answers_own() -> None:
    source, connection = Source(), Connection()
    async with answering(source, connection) as task:
        source.put(b"broken")  # whoever brings events does not see it
        with pytest.raises(ValueError, match="broken"):
            await task
    assert not connection.is_closed


@pytest.mark.parametrize("keep_alive_s", [0.0, 60.0])
async def test_a_client_that_leaves_ends_the_answer(keep_alive_s: float) -> None:
    source, connection = Source(), Connection()
    async with answering(source, connection, keep_alive_s=keep_alive_s) as task:
        connection.gone.set()
        await task
        source.put(b"late")
    assert connection.sent == []


async def test_comments_fill_silence_only() -> None:
    source, connection = Source(), Connection()
    begin = time.monotonic()
    async with answering(source, connection, keep_alive_s=0.05):
        for _ in range(20):
            source.put(b"event")
            await asyncio.sleep(0.01)
        while connection.sent[-1][1] != COMMENT:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        source.put(is_last=True)
    times = [begin, *connection.times]
    for i, (_, data) in enumerate(connection.sent):
        if data == COMMENT:
            assert times[i + 1] - times[i] >= 0.05


async def raw(
    url: str, body: dict[str, Any], version: str = "1.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection over which a request has been sent; little of the answer fits in it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", urlsplit(url).port))
    reader, writer = await asyncio.open_connection(sock=connection)
    send_request(writer, body, version)
    return reader, writer


def send_request(writer: asyncio.StreamWriter, body: dict[str, Any], version: str = "1.1") -> None:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}X-Request-Id: r\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


async def test_both_ways_send_the_same(url: str, client: httpx.AsyncClient) -> None:
    """The second client's connection has no short way."""
    body = {**STREAMED, "stream_options": {"include_usage": True}}
    texts = []
    async with httpx.AsyncClient(base_url=url) as direct:
        for one in (direct, client):
            answer = await one.post("/v1/completions", json=body, headers={"X-Request-Id": "r"})
            texts.append(re.sub(r'"created":\d+', "", answer.text))
    assert texts[0] == texts[1]
    assert texts[0].count("data: ") == 5


async def test_a_connection_serves_one_stream_after_the_other(url: str) -> None:
    reader, writer = await raw(url, STREAMED)
    first = await reader.readuntil(b"\r\n0\r\n\r\n")
    send_request(writer, STREAMED)
    second = await reader.readuntil(b"\r\n0\r\n\r\n")
    assert first.count(b"data: ") == second.count(b"data: ") == 4
    writer.close()


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_that_leaves_with_more_requests_waiting_ends_the_first(
    engine: FakeEngine, url: str, is_streamed: bool
) -> None:
    engine.hold_at = 1  # one piece comes, then the engine computes for ever
    reader, writer = await raw(url, STREAMED | {"stream": is_streamed})
    send_request(writer, STREAMED)
    async with asyncio.timeout(5):
        if is_streamed:
            await reader.readuntil(b"data: ")
        while not engine.streams:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        writer.close()
        while not engine.streams[0].is_aborted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert len(engine.streams) == 1


@pytest.mark.parametrize("num_requests", [2, 30])
async def test_requests_sent_at_once_are_answered_in_order(url: str, num_requests: int) -> None:
    reader, writer = await raw(url, STREAMED)
    for number in range(1, num_requests):
        send_request(writer, STREAMED | {"stream": number % 2 == 0})
    async with asyncio.timeout(10):
        for number in range(num_requests):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert (length is None) == (number % 2 == 0)
            body = await (
                reader.readuntil(b"\r\n0\r\n\r\n")
                if length is None
                else reader.readexactly(int(length[1]))
            )
            assert body.count(b"data: ") == (4 if length is None else 0)
    writer.close()


async def test_http_1_0_gets_a_stream_without_chunks(url: str) -> None:
    reader, writer = await raw(url, STREAMED, version="1.0")
    async with asyncio.timeout(5):
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"}\n\ndata: [DONE]\n\n")
    writer.close()


async def test_http_1_0_gets_a_whole_answer_with_its_length(url: str) -> None:
    reader, writer = await raw(url, {"prompt": "a"}, version="1.0")
    async with asyncio.timeout(5):
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}\r\n".encode() in head
    assert json.loads(body)["object"] == "text_completion"
    writer.close()


@pytest.mark.parametrize("is_paced", [False, True])
async def test_a_slow_reader_costs_bounded_memory_and_no_other_stream(
    engine: FakeEngine, url: str, is_paced: bool
) -> None:
    num_pieces, engine.is_paced = 400, is_paced
    engine.pieces = ["x" * 64_000] * num_pieces
    reader, writer = await raw(url, STREAMED | {"max_tokens": num_pieces})
    await reader.readuntil(b"data: ")
    async with asyncio.timeout(20):
        _, other = await raw(url, STREAMED | {"max_tokens": 3})
        while len(engine.streams) < 2 or not engine.streams[1].finished:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        slow = engine.streams[0]
        assert len(slow._left) > num_pieces // 2  # 12 MB of the 25 were not even made
        text = b""
        while not text.endswith(b"0\r\n\r\n"):
            text += await reader.read(1 << 20)
    assert slow.finished
    assert text.count(b"x" * 64_000) == num_pieces
    assert text.count(b"data: ") == num_pieces  # the first one was read before, [DONE] is the last
    writer.close()
    other.close()


async def test_what_a_turn_writes_leaves_in_order_before_what_is_scheduled_later() -> None:
    class Transport(asyncio.Transport):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def write(self, data: Any) -> None:
            seen.append((self.name, data))

        def is_closing(self) -> bool:
            return False

    seen: list[tuple[str, bytes]] = []
    outbox, first, second = Outbox(), Transport("first"), Transport("second")
    for data in (b"1", b"2"):
        outbox.put(first, data)
        outbox.put(second, data)
        asyncio.get_running_loop().call_soon(seen.append, ("later", data))
        assert seen == []
        await asyncio.sleep(0)
        assert seen == [("first", data), ("second", data), ("later", data)]
        seen.clear()
