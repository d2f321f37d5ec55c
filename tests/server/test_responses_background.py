"""Responses in the background: their stages, events that can be read again, cancel, shutdown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo.engine.api import GenerationRequest, RequestStream
from octavo.engine.config.server_config import ServerConfig
from octavo.server.app import create_app
from octavo.server.drain import Drain
from octavo.server.responses_events import EventLog

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
TEXT = "Hello 🌶\n"
LOGPROBS = {"include": ["message.output_text.logprobs"]}
ALL = [
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 3,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@asynccontextmanager
async def serving(
    engine: FakeEngine, drain: Drain | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ServerConfig(**options), ("tiny",), drain=drain)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        yield client


async def create(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json={"input": "hi", "background": True, **body})
    assert answer.status_code == 200, answer.text
    shape: dict[str, Any] = answer.json()
    return shape


async def get(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    answer = await client.get(f"{PATH}/{name}")
    assert answer.status_code == 200
    shape: dict[str, Any] = answer.json()
    return shape


async def until(client: httpx.AsyncClient, name: str, *statuses: str) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while True:
            shape = await get(client, name)
            if shape["status"] in statuses:
                return shape
            await asyncio.sleep(0)  # the application answers without waiting for anything


def parsed(text: str) -> list[dict[str, Any]]:
    frames = text.removesuffix("\n\n").split("\n\n") if text else []
    return [json.loads(frame.split("\ndata: ")[1]) for frame in frames]


# --- stages --------------------------------------------------------------------------------------


async def test_it_is_queued_then_in_progress_then_completed(engine: FakeEngine) -> None:
    async with serving(engine) as client:
        engine.hold_at = 3
        first = await create(client)
        assert (first["status"], first["output"], first["background"]) == ("queued", [], True)
        assert (await get(client, first["id"]))["status"] == "queued"
        engine.hold_at = 2
        engine.released.set()
        engine.released = asyncio.Event()
        now = await until(client, first["id"], "in_progress")
        assert now["output"] == []
        engine.released.set()
        last = await until(client, first["id"], "completed")
        assert last["output"][0]["content"][0]["text"] == TEXT
        assert last["usage"]["output_tokens"] == 3
        assert last.keys() == first.keys()


async def test_it_can_be_continued_once_it_has_ended(engine: FakeEngine) -> None:
    async with serving(engine) as client:
        engine.hold_at = 2
        first = await create(client)
        body = {"input": "more", "previous_response_id": first["id"]}
        early = await client.post(PATH, json=body)
        assert early.status_code == 400
        assert early.json()["error"]["param"] == "previous_response_id"
        engine.released.set()
        await until(client, first["id"], "completed")
        assert (await client.post(PATH, json=body)).status_code == 200


async def test_a_failure_is_told_by_its_status(engine: FakeEngine) -> None:
    async with serving(engine) as client:
        engine.error = "The logits are not finite."
        last = await until(client, (await create(client))["id"], "failed")
        assert last["error"] == {"code": "server_error", "message": "The logits are not finite."}


async def test_the_engine_s_death_fails_it(engine: FakeEngine) -> None:
    async with serving(engine) as client:
        engine.hold_at = 2
        first = await create(client)
        engine.die("killed")
        assert (await until(client, first["id"], "failed"))["usage"] is None


# --- cancel and delete ---------------------------------------------------------------------------


async def test_cancel_ends_it_at_once_and_twice_is_once(engine: FakeEngine) -> None:
    async with serving(engine) as client:
        engine.hold_at = 2
        first = await create(client)
        await until(client, first["id"], "in_progress")
        one = (await client.post(f"{PATH}/{first['id']}/cancel")).json()
        assert (one["status"], one["usage"]) == ("cancelled", None)
        assert one["output"][0]["content"][0]["text"] == "Hel"
        assert engine.streams[0].is_aborted
        assert (await client.post(f"{PATH}/{first['id']}/cancel")).json() == one
        assert await get(client, first["id"]) == one
        again = {"input": "more", "previous_response_id": first["id"]}
        assert (await client.post(PATH, json=again)).status_code == 400


async def test_cancel_of_a_queued_one_leaves_no_output(engine: FakeEngine) -> None:
    async with serving(engine) as client:
        engine.hold_at = 99
        first = await create(client)
        one = (await client.post(f"{PATH}/{first['id']}/cancel")).json()
        assert (one["status"], one["output"]) == ("cancelled", [])
        assert engine.streams[0].is_aborted


async def test_cancel_of_a_completed_one_changes_nothing(engine: FakeEngine) -> None:
    async with serving(engine) as client:
        last = await until(client, (await create(client))["id"], "completed")
        assert (await client.post(f"{PATH}/{last['id']}/cancel")).json() == last


async def test_delete_ends_it(engine: FakeEngine) -> None:
    drain = Drain()
    async with serving(engine, drain) as client:
        engine.hold_at = 2
        first = await create(client)
        assert drain.num_active == 1
        assert (await client.delete(f"{PATH}/{first['id']}")).json()["deleted"] is True
        assert (await client.get(f"{PATH}/{first['id']}")).status_code == 404
        assert engine.streams[0].is_aborted
        assert drain.num_active == 0


# --- events --------------------------------------------------------------------------------------


async def test_events_can_be_read_from_any_number_on(engine: FakeEngine) -> None:
    async with serving(engine) as client:
        answer = await client.post(PATH, json={"input": "hi", "background": True, "stream": True})
        events = parsed(answer.text)
        assert [event["type"] for event in events] == ALL
        assert [event["sequence_number"] for event in events] == list(range(len(ALL)))
        stages = [e["response"]["status"] for e in events if "response" in e]
        assert stages == ["queued", "queued", "in_progress", "completed"]
        path = f"{PATH}/{events[0]['response']['id']}?stream=true"
        assert (await client.get(path)).text == answer.text
        for after in (0, 5, len(ALL) - 2, len(ALL) - 1, 99):
            rest = await client.get(f"{path}&starting_after={after}")
            assert parsed(rest.text) == events[after + 1 :]


async def test_a_reader_that_leaves_does_not_end_it_and_may_come_back(
    engine: FakeEngine, url: str
) -> None:
    engine.hold_at = 2
    body = {"input": "hi", "background": True, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=5) as client:
        async with client.stream("POST", PATH, json=body) as stream:
            lines = stream.aiter_lines()
            first = json.loads((await anext(lines) and await anext(lines)).removeprefix("data: "))
            async for line in lines:
                if '"delta":"Hel"' in line:
                    break
        name = first["response"]["id"]
        assert (await get(client, name))["status"] == "in_progress"
        assert not engine.streams[0].is_aborted
        reading = asyncio.create_task(client.get(f"{PATH}/{name}?stream=true&starting_after=4"))
        await get(client, name)  # the loop turns
        engine.released.set()
        assert [event["type"] for event in parsed((await reading).text)] == ALL[5:]
        assert (await get(client, name))["status"] == "completed"


async def test_readers_see_the_cancellation(engine: FakeEngine, url: str) -> None:
    engine.hold_at = 2
    body = {"input": "hi", "background": True, "stream": True}
    texts, name = "", ""
    async with (
        httpx.AsyncClient(base_url=url, timeout=5) as client,
        client.stream("POST", PATH, json=body) as stream,
    ):
        async for text in stream.aiter_text():
            texts += text
            if not name and '"delta":"Hel"' in texts:
                name = parsed(texts)[0]["response"]["id"]
                await client.post(f"{PATH}/{name}/cancel")
    events = parsed(texts)
    assert [event["type"] for event in events] == [
        *ALL[:6],
        *ALL[-4:-1],
        "response.incomplete",
    ]
    assert events[-1]["response"]["status"] == "cancelled"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_readers_see_a_failure(engine: FakeEngine) -> None:
    async with serving(engine) as client:
        engine.error = "broken"
        answer = await client.post(PATH, json={"input": "hi", "background": True, "stream": True})
        assert parsed(answer.text)[-1]["type"] == "response.failed"
        assert parsed(answer.text)[-1]["response"]["error"]["message"] == "broken"


async def test_events_are_only_kept_where_they_were_asked_for(engine: FakeEngine) -> None:
    async with serving(engine) as client:
        last = await until(client, (await create(client))["id"], "completed")
        answer = await client.get(f"{PATH}/{last['id']}?stream=true")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "stream"


async def test_every_reader_of_a_log_gets_everything() -> None:
    log = EventLog()

    async def read(after: int) -> bytes:
        return b"".join([data async for data in log.after(after)])

    readers = [asyncio.create_task(read(after)) for after in (-1, 0, 7)]
    log.append([b"a", b"b"])
    await asyncio.sleep(0)
    log.append([b"c"])
    log.close()
    assert await asyncio.gather(*readers) == [b"abc", b"bc", b""]
    assert log.num_bytes == 3


# --- bounds and shutdown -------------------------------------------------------------------------


async def test_no_more_run_than_the_store_has_room_for(engine: FakeEngine) -> None:
    engine.hold_at = 2
    async with serving(engine, response_store_size=2) as client:
        first, _ = await create(client), await create(client)
        answer = await client.post(PATH, json={"input": "hi", "background": True})
        assert answer.status_code == 429
        assert answer.headers["Retry-After"]
        await client.post(f"{PATH}/{first['id']}/cancel")
        await create(client)
        assert (await client.get(f"{PATH}/{first['id']}")).status_code == 404  # made room


async def test_room_is_looked_at_again_once_the_engine_has_admitted(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, both_came = engine.submit, asyncio.Barrier(2)

    async def slow(requests: Sequence[GenerationRequest]) -> Sequence[RequestStream]:
        await both_came.wait()
        return await submit(requests)

    monkeypatch.setattr(engine, "submit", slow)
    engine.hold_at = 2
    async with serving(engine, response_store_size=1) as client:
        body = {"input": "hi", "background": True}
        both = await asyncio.gather(*(client.post(PATH, json=body) for _ in range(2)))
        assert sorted(answer.status_code for answer in both) == [200, 429]
        assert [stream.is_aborted for stream in engine.streams] == [False, True]


async def test_a_conversation_that_the_store_cannot_hold_is_refused(engine: FakeEngine) -> None:
    async with serving(engine, response_store_bytes=5_000) as client:
        body = {"input": "x" * 6_000, "background": True}
        answer = await client.post(PATH, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "background"
        assert "--response-store-bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"top_logprobs": 5, **LOGPROBS}])
async def test_one_that_outgrows_the_store_ends(
    engine: FakeEngine, options: dict[str, Any]
) -> None:
    engine.pieces = ["x" * 500] * 100
    async with serving(engine, response_store_bytes=20_000) as client:
        answer = await client.post(PATH, json={"input": "hi", "background": True, **options})
        is_streamed = options.get("stream")
        shape = parsed(answer.text)[-1]["response"] if is_streamed else answer.json()
        last = await until(client, shape["id"], "failed")
        assert "outgrew the store" in last["error"]["message"]
        assert last["output"] == []
        assert engine.streams[0].is_aborted
        if is_streamed:
            assert shape == last
            assert len(answer.text) < 40_000
        engine.pieces = ["x" * 5_000]  # all that was counted is free again
        await until(client, (await create(client))["id"], "completed")


async def test_what_has_ended_makes_room_while_one_grows(engine: FakeEngine) -> None:
    async with serving(engine, response_store_bytes=20_000) as client:
        first = (await client.post(PATH, json={"input": "hi"})).json()
        engine.pieces, engine.hold_at = ["x" * 1_000] * 21, 4
        growing = await create(client)
        await until(client, growing["id"], "in_progress")
        async with asyncio.timeout(5):
            while (await client.get(f"{PATH}/{first['id']}")).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert (await get(client, growing["id"]))["status"] == "in_progress"


async def test_a_shutdown_waits_for_it_and_then_cancels_it(engine: FakeEngine) -> None:
    drain = Drain()
    async with serving(engine, drain) as client:
        engine.hold_at = 2
        first = await create(client)
        assert (await client.get("/load")).json() == {"server_load": 1}
        drain.is_draining = True
        answer = await client.post(PATH, json={"input": "hi"})
        assert answer.status_code == 503
        waiting = asyncio.create_task(drain.wait_idle())
        await asyncio.sleep(0)
        assert not waiting.done()
        await engine.close()
        last = await until(client, first["id"], "cancelled")
        assert last["output"][0]["content"][0]["text"] == "Hel"
        await waiting
