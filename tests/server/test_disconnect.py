"""A client that goes away takes its engine requests with it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from octavo.engine.config.server_config import ServerConfig
from octavo.server.app import create_app

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio


async def cut_off(engine: FakeEngine, body: dict[str, Any], *, after: int) -> list[Any]:
    """Call the application; the client leaves once ``after`` messages came back."""
    app = create_app(engine, ServerConfig(), ("tiny",))
    sent: list[Any] = []
    gone = asyncio.Event()
    inbox: list[Any] = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) >= after:
            gone.set()

    if after == 0:
        gone.set()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    async with asyncio.timeout(5):
        await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
@pytest.mark.parametrize("after", [0, 1, 2])
async def test_stream(engine: FakeEngine, prompt: Any, after: int) -> None:
    engine.hold_at = 2  # one piece comes, then the engine computes for ever
    await cut_off(engine, {"prompt": prompt, "stream": True}, after=after)
    assert engine.streams
    assert all(stream.is_aborted for stream in engine.streams)


async def test_stream_that_still_waits_in_the_queue(engine: FakeEngine) -> None:
    engine.hold_at = 99
    await cut_off(engine, {"prompt": "a", "stream": True}, after=1)
    assert engine.streams[0].is_aborted


async def test_whole_answer(engine: FakeEngine) -> None:
    engine.hold_at = 2
    sent = await cut_off(engine, {"prompt": ["a", "b"]}, after=0)
    assert all(stream.is_aborted for stream in engine.streams)
    assert sent[0]["status"] == 499


async def test_client_that_leaves_while_it_sends(engine: FakeEngine) -> None:
    app = create_app(engine, ServerConfig(), ("tiny",))
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 499
    assert engine.requests == []


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_closed_socket(engine: FakeEngine, url: str, is_streamed: bool) -> None:
    engine.hold_at = 2
    body = json.dumps({"prompt": "a", "stream": is_streamed}).encode()
    port = urlsplit(url).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    if is_streamed:
        await reader.readuntil(b"Hel")
    async with asyncio.timeout(5):
        while not engine.streams:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        writer.close()
        while not engine.streams[0].is_aborted:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_engine_death_ends_live_streams_with_an_event(engine: FakeEngine, url: str) -> None:
    engine.hold_at = 2
    port = urlsplit(url).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"prompt":"a","stream":true}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await reader.readuntil(b"Hel")
    engine.die("killed")
    rest = await reader.readuntil(b"data: [DONE]\n\n")
    assert b'{"error":{' in rest
    assert b"engine_dead" in rest
    writer.close()
