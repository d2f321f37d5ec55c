"""The routes of --enable-debug-endpoints."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest

from octavo.engine.stats import EngineStats

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
KEY = {"Authorization": "Bearer first"}
ASKING = [("GET", "/debug/kv"), ("POST", "/reset_prefix_cache")]
ROUTES = [*ASKING, ("GET", "/debug/steps")]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_the_flag_there_is_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, method: str, path: str
) -> None:
    answer = await client.request(method, path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    assert engine.num_resets == 0
    assert path not in (await client.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_both_are_behind_the_key(
    debugged: httpx.AsyncClient, engine: FakeEngine, method: str, path: str
) -> None:
    assert (await debugged.request(method, path)).status_code == 401
    assert engine.num_resets == 0
    assert (await debugged.request(method, path, headers=KEY)).status_code == 200


async def test_steps_come_from_the_engines_reports(
    debugged: httpx.AsyncClient, engine: FakeEngine
) -> None:
    assert engine.sink is not None
    engine.sink.record_step(EngineStats(num_steps=1, num_scheduled_tokens=30, busy_s=0.5), 30)
    engine.sink.record_stats(EngineStats(num_steps=1, num_scheduled_tokens=30, busy_s=0.5))
    after = EngineStats(
        num_steps=2, num_scheduled_tokens=34, busy_s=0.75, num_running=4, num_blocks=9
    )
    engine.sink.record_step(after, 4)
    first, second = (await debugged.get("/debug/steps", headers=KEY)).json()["steps"]
    assert (first["step"], first["num_scheduled_tokens"], first["busy_ms"]) == (1, 30, 500.0)
    assert (second["step"], second["num_scheduled_tokens"], second["busy_ms"]) == (2, 4, 250.0)
    assert (second["num_running"], second["num_free_blocks"]) == (4, 9)


async def test_snapshot_has_exactly_the_published_shape(debugged: httpx.AsyncClient) -> None:
    answer = await debugged.get("/debug/kv", headers=KEY)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "num_blocks": 2,
        "block_size": 16,
        "blocks": [
            {"id": 0, "ref_count": 2, "num_filled": 16, "is_cached": True, "seq_ids": [4, 5]},
            {"id": 1, "ref_count": 0, "num_filled": 0, "is_cached": False, "seq_ids": []},
        ],
        "sequences": [
            {
                "request_id": "r",
                "seq_id": 4,
                "status": "running",
                "num_tokens": 16,
                "block_table": [0],
            },
            {
                "request_id": "r",
                "seq_id": 5,
                "status": "waiting",
                "num_tokens": 16,
                "block_table": [0],
            },
        ],
    }


async def test_reset(debugged: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await debugged.post("/reset_prefix_cache", headers=KEY)
    assert answer.json() == {"success": True}
    assert engine.num_resets == 1


@pytest.mark.parametrize(("method", "path"), ASKING)
async def test_no_engine_is_a_503(
    debugged: httpx.AsyncClient, engine: FakeEngine, method: str, path: str
) -> None:
    engine.is_ready = False
    answer = await debugged.request(method, path, headers=KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_not_ready")
    engine.is_ready = True
    engine.die("killed")
    answer = await debugged.request(method, path, headers=KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


async def test_a_hundred_at_once(debugged: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(debugged.get("/debug/kv", headers=KEY) for _ in range(100)))
    assert {answer.status_code for answer in answers} == {200}
