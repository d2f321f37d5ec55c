"""Streamed responses: the events, their order and numbers, and how they end."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from octavo.engine.config.server_config import ServerConfig
from octavo.server.app import create_app

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
TEXT = "Hello 🌶\n"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OPENING = ["response.created", "response.in_progress"]
BEGIN = ["response.output_item.added", "response.content_part.added"]
DELTA = "response.output_text.delta"
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def parsed(content: bytes) -> list[dict[str, Any]]:
    """The events: each has its type twice, a number one above the last, and a shape that the SDK knows."""
    found = []
    for frame in content.decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        shape = json.loads(data.removeprefix("data: "))
        assert name == f"event: {shape['type']}"
        EVENT.validate_python(shape)
        found.append(shape)
    return found


async def streamed(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    answer = await client.post(PATH, json={"input": "hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = parsed(answer.content)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


async def test_events_come_in_the_documented_order(client: httpx.AsyncClient) -> None:
    events = await streamed(client)
    assert kinds(events) == [*OPENING, *BEGIN, DELTA, DELTA, DELTA, *END, "response.completed"]
    assert [event["delta"] for event in events if event["type"] == DELTA] == ["Hel", "lo", " 🌶\n"]
    created, progress = events[0]["response"], events[1]["response"]
    assert created == progress
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)


async def test_events_agree_with_each_other(client: httpx.AsyncClient) -> None:
    events = {event["type"]: event for event in await streamed(client)}
    last = events["response.completed"]["response"]
    (item,) = last["output"]
    assert item["content"][0]["text"] == TEXT == events["response.output_text.done"]["text"]
    assert events["response.output_item.done"]["item"] == item
    assert events["response.content_part.done"]["part"] == item["content"][0]
    assert events["response.output_item.added"]["item"] == {
        **item,
        "status": "in_progress",
        "content": [],
    }
    assert events["response.content_part.added"]["part"] == {**item["content"][0], "text": ""}
    for kind in (DELTA, *END[:2], "response.content_part.added"):
        place = {name: events[kind][name] for name in ("item_id", "output_index", "content_index")}
        assert place == {"item_id": item["id"], "output_index": 0, "content_index": 0}
    assert {event["response"]["id"] for event in events.values() if "response" in event} == {
        last["id"]
    }


async def test_the_last_event_has_the_whole_answer(client: httpx.AsyncClient) -> None:
    whole = (await client.post(PATH, json={"input": "hi"})).json()
    last = (await streamed(client))[-1]["response"]
    own = {"id", "created_at", "completed_at", "output"}
    assert {k: v for k, v in last.items() if k not in own} == {
        k: v for k, v in whole.items() if k not in own
    }
    assert last["output"][0]["content"] == whole["output"][0]["content"]


async def test_a_full_answer_ends_with_incomplete(client: httpx.AsyncClient) -> None:
    events = await streamed(client, max_output_tokens=1)
    assert kinds(events) == [*OPENING, *BEGIN, DELTA, *END, "response.incomplete"]
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-2]["item"]["status"] == "incomplete"


async def test_an_empty_answer_has_a_message(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.pieces = []
    events = await streamed(client)
    assert kinds(events) == [*OPENING, *BEGIN, *END, "response.completed"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_log_probabilities_are_told_with_their_text(client: httpx.AsyncClient) -> None:
    events = await streamed(client, include=["message.output_text.logprobs"], top_logprobs=1)
    deltas = [event["logprobs"] for event in events if event["type"] == DELTA]
    assert [len(logprobs) for logprobs in deltas] == [1, 1, 1]
    done = next(event for event in events if event["type"] == END[0])
    assert done["logprobs"] == [one for logprobs in deltas for one in logprobs]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == done["logprobs"]


async def test_without_them_the_list_is_empty(client: httpx.AsyncClient) -> None:
    events = await streamed(client)
    assert [event["logprobs"] for event in events if "logprobs" in event] == [[]] * 4


async def test_a_failure_is_the_last_event(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.error = "The logits are not finite."
    events = await streamed(client)
    assert kinds(events) == [*OPENING, *BEGIN, DELTA, DELTA, "response.failed"]
    last = events[-1]["response"]
    assert (last["status"], last["usage"]) == ("failed", None)
    assert last["error"] == {"code": "server_error", "message": "The logits are not finite."}


async def test_the_engine_s_death_is_the_last_event(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.hold_at = 2
    asking = asyncio.create_task(streamed(client))
    while not engine.streams:  # noqa: ASYNC110
        await asyncio.sleep(0)
    engine.die("killed")
    events = await asking
    assert kinds(events)[-1] == "response.failed"
    assert events[-1]["response"]["error"]["message"] == "The engine has ended."


async def test_a_shutdown_cancels(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.is_closed = True
    events = await streamed(client)
    assert kinds(events) == [*OPENING, *BEGIN, *END, "response.incomplete"]
    assert events[-1]["response"]["status"] == "cancelled"
    assert events[-1]["response"]["incomplete_details"] is None


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_that_leaves_ends_it_and_nothing_is_stored(
    engine: FakeEngine, is_streamed: bool
) -> None:
    engine.hold_at = 2
    app = create_app(engine, ServerConfig(), ("tiny",))
    body = json.dumps({"input": "a", "stream": is_streamed}).encode()
    inbox: list[Any] = [{"type": "http.request", "body": body}]
    sent: list[Any] = []

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        while is_streamed and len(sent) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    async with asyncio.timeout(5):
        await app(scope, receive, send)
    assert engine.streams[0].is_aborted
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        metrics = (await client.get("/metrics")).text
    assert 'octavo:stored_responses{engine="0",model_name="tiny"} 0.0' in metrics
