"""What every answer carries, and what proxies, browsers and orchestrators expect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from octavo.engine.config.server_config import ServerConfig
from octavo.server.app import create_app

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
PROMPT = {"prompt": "a"}


@asynccontextmanager
async def serving(engine: FakeEngine, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(**options), ("tiny",)))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        yield client


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-1.2_3", "abc-1.2_3"),
        ("a b<c>\u00e9", "abc"),
        ("x" * 10_000, "x" * 64),
        ("a\r\nSet-Cookie: b\0", "aSet-Cookieb"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_request_ids_come_back(
    client: httpx.AsyncClient, given: str, kept: str, stream: bool
) -> None:
    headers = {b"X-Request-Id": given.encode()}
    answer = await client.post(
        "/v1/completions", json={**PROMPT, "stream": stream}, headers=headers
    )
    assert answer.headers.get_list("x-request-id") == [kept]
    assert f'"cmpl-{kept}"' in answer.text


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/models"])
async def test_every_answer_has_an_id_and_a_time(guarded: httpx.AsyncClient, path: str) -> None:
    first, second = await guarded.get(path), await guarded.get(path)
    assert len(first.headers["x-request-id"]) == 32
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert int(first.headers["openai-processing-ms"]) >= 0


async def test_ids_of_answers_are_ids_of_requests(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json=PROMPT)
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
async def test_ping_is_health(guarded: httpx.AsyncClient, engine: FakeEngine, method: str) -> None:
    assert (await guarded.request(method, "/ping")).status_code == 200
    engine.die("gone")
    assert (await guarded.request(method, "/ping")).status_code == 503


async def test_load_counts_requests_in_progress(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    assert (await client.get("/load")).json() == {"server_load": 0}
    engine.hold_at = 2
    tasks = [asyncio.create_task(client.post("/v1/completions", json=PROMPT)) for _ in range(3)]
    async with asyncio.timeout(10):
        while len(engine.streams) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert (await client.get("/load")).json() == {"server_load": 3}
    engine.released.set()
    await asyncio.gather(*tasks)
    assert (await client.get("/load")).json() == {"server_load": 0}


ORIGIN = "https://app.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}


async def test_without_origins_there_is_no_cors(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models", headers={"Origin": ORIGIN})
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_preflights_need_no_key(engine: FakeEngine) -> None:
    async with serving(engine, api_key=("k",), allowed_origins=(ORIGIN,)) as client:
        answer = await client.options("/v1/completions", headers=PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        refused = await client.options(
            "/v1/completions", headers={**PREFLIGHT, "Origin": "https://other.example"}
        )
        assert "access-control-allow-origin" not in refused.headers


async def test_refusals_can_be_read_by_allowed_pages(engine: FakeEngine) -> None:
    async with serving(engine, api_key=("k",), allowed_origins=("*",)) as client:
        answer = await client.get("/v1/models", headers={"Origin": ORIGIN})
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_a_proxys_prefix_may_be_there_or_cut(engine: FakeEngine, prefix: str) -> None:
    async with serving(engine, root_path="/llm", api_key=("k",)) as client:
        assert (await client.get(f"{prefix}/health")).status_code == 200
        assert (await client.get(f"{prefix}/v1/models")).status_code == 401
        key = {"Authorization": "Bearer k"}
        assert (await client.get(f"{prefix}/v1/models", headers=key)).status_code == 200
        page = await client.get(f"{prefix}/docs", headers=key)
        assert "'/llm/openapi.json'" in page.text
        document = (await client.get(f"{prefix}/openapi.json", headers=key)).json()
        assert document["servers"] == [{"url": "/llm"}]
        assert (await client.get("/llm/llm/v1/models", headers=key)).status_code == 404


async def test_silent_streams_get_comments_between_events(engine: FakeEngine) -> None:
    """A12: an idle proxy must see bytes."""
    engine.hold_at = 2
    async with serving(engine, sse_keep_alive_interval=0.01) as client:
        sending = asyncio.create_task(
            client.post("/v1/completions", json={**PROMPT, "stream": True})
        )
        await asyncio.sleep(0.1)
        engine.released.set()
        text = (await sending).text
    events = [part for part in text.split("\n\n") if part]
    comments = [part for part in events if part.startswith(":")]
    assert comments
    assert set(comments) == {": keep-alive"}
    data = [part for part in events if not part.startswith(":")]
    assert all(part.startswith("data: ") for part in data)
    assert data[-1] == "data: [DONE]"
    assert events.index(comments[0]) > events.index(data[0])


async def test_clients_pass_over_comments(engine: FakeEngine) -> None:
    engine.hold_at = 2
    async with serving(engine, sse_keep_alive_interval=0.01) as http:
        any_client: Any = http
        client = openai.AsyncOpenAI(
            base_url="http://octavo/v1", api_key="k", http_client=any_client
        )
        asyncio.get_running_loop().call_later(0.1, engine.released.set)
        stream = await client.completions.create(model="tiny", prompt="a", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "".join(engine.pieces)


async def test_by_default_streams_have_no_comments(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.hold_at = 2
    asyncio.get_running_loop().call_later(0.1, engine.released.set)
    answer = await client.post("/v1/completions", json={**PROMPT, "stream": True})
    assert "\n:" not in answer.text


async def test_bad_requests_are_refused_before_the_stream(engine: FakeEngine) -> None:
    async with serving(engine, sse_keep_alive_interval=0.01) as client:
        body = {**PROMPT, "stream": True, "top_p": 2}
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
