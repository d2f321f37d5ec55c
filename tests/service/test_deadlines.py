"""Requests whose time is up, through the HTTP side and a real client of an engine process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.engine.config.server_config import ServerConfig
from octavo.server.app import create_app
from octavo.server.deadlines import GATEWAY_HEADER, TIMEOUT_HEADER
from tests.service.test_client import is_ready, play, running, until

LONG = {"prompt": [1], "max_tokens": 400}  # 8 s of the slow engine
SOON = "0.2"


@asynccontextmanager
async def serving(model: Path, limit_s: float = 0.0) -> AsyncIterator[httpx.AsyncClient]:
    async with running(model, "slow") as engine:
        await until(lambda: is_ready(engine))
        app = create_app(engine, ServerConfig(request_timeout=limit_s), ("tiny",))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            yield client
            assert not engine._requests.streams
            await until(lambda: (stats := engine.stats()) is not None and not stats.num_running)


def is_timeout(error: dict[str, Any]) -> bool:
    return (error["type"], error["code"]) == ("timeout_error", "request_timeout")


@pytest.mark.parametrize(
    ("timeout", "headers"),
    [
        (0.2, {}),
        (0.2, {TIMEOUT_HEADER: "60"}),
        (0.0, {TIMEOUT_HEADER: SOON, GATEWAY_HEADER: "60000"}),
        (60.0, {GATEWAY_HEADER: "200"}),
    ],
)
def test_the_least_time_ends_a_request(
    tiny_model: Path, timeout: float, headers: dict[str, str]
) -> None:
    async def scene() -> None:
        async with serving(tiny_model, timeout) as client:
            answer = await client.post("/v1/completions", json=LONG, headers=headers)
            assert answer.status_code == 504
            assert answer.headers["x-should-retry"] == "false"
            assert is_timeout(answer.json()["error"])
            assert "octavo:request_timeouts_total" in (await client.get("/metrics")).text

    play(scene)


def test_a_stream_ends_with_the_error(tiny_model: Path) -> None:
    async def scene() -> None:
        async with serving(tiny_model) as client:
            body, headers = {**LONG, "stream": True}, {TIMEOUT_HEADER: SOON}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            *_, last, done = (line for line in answer.text.split("\n\n") if line)
            assert done == "data: [DONE]"
            assert is_timeout(json.loads(last.removeprefix("data: "))["error"])

    play(scene)


async def end_of(client: httpx.AsyncClient, body: Any, headers: dict[str, str]) -> dict[str, Any]:
    created = await client.post("/v1/responses", json=body, headers=headers)
    response: dict[str, Any] = created.json()
    async with asyncio.timeout(20):
        while response["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            response = (await client.get(f"/v1/responses/{response['id']}")).json()
    return response


def test_a_response_fails_and_a_gateway_does_not_hurry_one_in_the_background(
    tiny_model: Path,
) -> None:
    async def scene() -> None:
        async with serving(tiny_model) as client:
            body = {"input": "a", "max_output_tokens": 400, "background": True}
            late = await end_of(client, body, {GATEWAY_HEADER: "1", TIMEOUT_HEADER: SOON})
            assert late["status"] == "failed"
            assert "time" in late["error"]["message"]
            short = {**body, "max_output_tokens": 4}
            assert (await end_of(client, short, {GATEWAY_HEADER: "1"}))["status"] == "incomplete"

    play(scene)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "1e3", "soon", ""])
def test_times_that_are_none(tiny_model: Path, value: str) -> None:
    async def scene() -> None:
        async with serving(tiny_model) as client:
            for name in (TIMEOUT_HEADER, GATEWAY_HEADER):
                answer = await client.post("/v1/completions", json=LONG, headers={name: value})
                assert answer.status_code == 400
                assert name in answer.json()["error"]["message"]

    play(scene)
