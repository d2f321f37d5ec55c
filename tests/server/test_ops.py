"""Health, readiness, version and models, over the engine's life."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from octavo import __version__
from octavo.engine.config.server_config import ServerConfig
from octavo.server.app import create_app
from octavo.server.drain import Drain

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
PROMPT = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def test_ready(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).json() == {"status": "ready"}
    assert (await client.head("/health")).status_code == 200
    assert (await client.get("/version")).json() == {"version": __version__}


async def test_loading_is_alive_and_not_ready(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.is_ready = False
    assert (await client.get("/health")).status_code == 200
    ready = await client.get("/ready")
    assert (ready.status_code, ready.json()["stage"], ready.json()["progress"]) == (
        503,
        "loading",
        0.25,
    )
    assert (await client.get("/metrics")).status_code == 200
    assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] is None
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        answer = await client.post(path, json=body)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["code"] == "engine_not_ready"


async def test_restarting_is_alive_and_accepts_and_is_not_ready(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.is_restarting = True
    assert (await client.get("/health")).status_code == 200
    ready = await client.get("/ready")
    assert ready.status_code == 503
    assert (ready.json()["stage"], ready.json()["progress"]) == ("restarting", 0.0)
    assert ready.json()["error"]["code"] == "engine_not_ready"
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        assert (await client.post(path, json=body)).status_code == 200


async def test_restarts_are_counted(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for count in (0, 1, 3):
        engine.restarts = count
        text = (await client.get("/metrics")).text
        (line,) = [x for x in text.splitlines() if x.startswith("octavo:engine_restarts_total")]
        assert line.endswith(f" {count}.0")


async def test_startup_tells_how_far_it_has_come(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.is_ready = False
    starting = await client.get("/startup")
    assert starting.status_code == 503
    assert starting.json() == {"status": "starting", "stage": "loading", "percent": 25}
    engine.is_ready = True
    started = await client.get("/startup")
    assert started.status_code == 200
    assert started.json() == {"status": "started", "stage": "ready", "percent": 100}
    engine.die("killed")
    assert (await client.get("/startup")).status_code == 503


async def test_dead_is_503_everywhere_that_matters(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.die("killed by signal 9 at /secret")
    for answer in (
        await client.get("/health"),
        await client.get("/ready"),
        await client.post("/v1/completions", json=PROMPT),
        await client.post("/v1/completions", json={**PROMPT, "stream": True}),
    ):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
        assert "secret" not in answer.text


async def test_draining_refuses_generation_and_stays_alive(engine: FakeEngine) -> None:
    drain = Drain()
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(), ("tiny",), drain=drain))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        drain.is_draining = True
        answer = await client.post("/v1/completions", json=PROMPT)
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        assert (await client.get("/ready")).json()["status"] == "stopping"
        assert (await client.get("/health")).status_code == 200


async def test_models(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["tiny", "alias/one"]
    for card in body["data"]:
        assert card["object"] == "model"
        assert card["owned_by"] == "octavo"
        assert card["max_model_len"] == 64
        assert (await client.get(f"/v1/models/{card['id']}")).json() == card
