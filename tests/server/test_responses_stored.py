"""Stored responses: retrieved, continued, listed, deleted, and the bounds of the store."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from octavo.engine.api import ChatPrompt
from octavo.engine.config.server_config import ServerConfig
from octavo.server.app import create_app

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
TEXT = "Hello 🌶\n"
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


@asynccontextmanager
async def serving(engine: FakeEngine, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ServerConfig(**options), ("tiny",))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        yield client


async def create(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json={"input": "hi", **body})
    assert answer.status_code == 200, answer.text
    shape: dict[str, Any] = answer.json()
    return shape


async def is_stored(client: httpx.AsyncClient, response: dict[str, Any]) -> bool:
    answer = await client.get(f"{PATH}/{response['id']}")
    assert answer.status_code in (200, 404)
    return answer.status_code == 200


def seen(engine: FakeEngine) -> list[tuple[str, str]]:
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return [(message["role"], message["content"]) for message in prompt.messages]


# --- retrieve and delete -------------------------------------------------------------------------


async def test_a_stored_response_is_what_was_answered(client: httpx.AsyncClient) -> None:
    whole = await create(client, metadata={"a": "b"})
    assert (await client.get(f"{PATH}/{whole['id']}")).json() == whole
    assert whole["store"] is True


async def test_a_streamed_response_is_stored_before_its_last_event(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.post(PATH, json={"input": "hi", "stream": True})
    last = json.loads(answer.text.strip().split("data: ")[-1])["response"]
    assert (await client.get(f"{PATH}/{last['id']}")).json() == last


async def test_store_false_is_not_kept(client: httpx.AsyncClient) -> None:
    whole = await create(client, store=False)
    assert whole["store"] is False
    assert not await is_stored(client, whole)


async def test_a_deleted_response_is_gone(client: httpx.AsyncClient) -> None:
    whole = await create(client)
    path = f"{PATH}/{whole['id']}"
    answer = await client.delete(path)
    assert answer.json() == {"id": whole["id"], "object": "response", "deleted": True}
    for gone in (await client.get(path), await client.delete(path)):
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "response_not_found"
        assert whole["id"] in gone.json()["error"]["message"]


@pytest.mark.parametrize("path", ["", "/input_items"])
async def test_unknown_ids_are_a_404(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(f"{PATH}/resp_nothing{path}")).status_code == 404
    assert (await client.post(f"{PATH}/resp_nothing/cancel")).status_code == 404


async def test_stored_responses_are_behind_the_key(guarded: httpx.AsyncClient) -> None:
    assert (await guarded.get(f"{PATH}/resp_nothing")).status_code == 401
    assert (await guarded.delete(f"{PATH}/resp_nothing")).status_code == 401


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true", "stream"),  # it was not created in the background
        ("stream=perhaps", "stream"),
        ("starting_after=1", "starting_after"),
        ("starting_after=-1&stream=true", "starting_after"),
        ("starting_after=x&stream=true", "starting_after"),
        ("include[]=nothing", "include[0]"),
        ("include_obfuscation=true", "include_obfuscation"),
    ],
)
async def test_wrong_queries_are_refused_by_name(
    client: httpx.AsyncClient, query: str, param: str
) -> None:
    whole = await create(client)
    answer = await client.get(f"{PATH}/{whole['id']}?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_response_of_the_foreground_cannot_be_cancelled(client: httpx.AsyncClient) -> None:
    whole = await create(client)
    answer = await client.post(f"{PATH}/{whole['id']}/cancel")
    assert answer.status_code == 400
    assert "background" in answer.json()["error"]["message"]


# --- previous_response_id ------------------------------------------------------------------------


async def test_a_conversation_goes_on(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    first = await create(client, input="one", instructions="be brief")
    second = await create(client, input="two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    turns = [("user", "one"), ("assistant", TEXT), ("user", "two")]
    assert seen(engine) == turns  # the instructions are not inherited
    await create(client, input="three", previous_response_id=second["id"], instructions="new")
    assert seen(engine) == [("system", "new"), *turns, ("assistant", TEXT), ("user", "three")]
    await create(client, input="else", previous_response_id=first["id"])  # a branch
    assert seen(engine) == [*turns[:2], ("user", "else")]


async def test_an_incomplete_response_can_be_continued(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    first = await create(client, max_output_tokens=1)
    await create(client, input="go on", previous_response_id=first["id"], store=False)
    assert seen(engine) == [("user", "hi"), ("assistant", "Hel"), ("user", "go on")]


async def test_a_failed_response_is_stored_and_cannot_be_continued(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.error = "broken"
    answer = await client.post(PATH, json={"input": "hi", "stream": True})
    name = answer.text.split('"id":"')[1].split('"')[0]
    assert (await client.get(f"{PATH}/{name}")).json()["status"] == "failed"
    again = await client.post(PATH, json={"input": "hi", "previous_response_id": name})
    assert again.status_code == 400
    assert again.json()["error"]["param"] == "previous_response_id"


async def test_an_unknown_previous_response_is_named(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, json={"input": "hi", "previous_response_id": "resp_x"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (
        "previous_response_id",
        "previous_response_not_found",
    )
    assert "resp_x" in error["message"]


async def test_a_conversation_survives_the_deletion_of_its_beginning(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    first = await create(client, input="one")
    second = await create(client, input="two", previous_response_id=first["id"])
    await client.delete(f"{PATH}/{first['id']}")
    await create(client, input="three", previous_response_id=second["id"])
    assert [text for role, text in seen(engine) if role == "user"] == ["one", "two", "three"]


# --- input items ---------------------------------------------------------------------------------


async def test_input_items_are_the_conversation(client: httpx.AsyncClient) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    first = await create(client, input=[{"role": "developer", "content": "d"}])
    items: Any = [{"role": "user", "content": parts, "id": "msg_mine"}]
    second = await create(client, input=items, previous_response_id=first["id"])
    answer = (await client.get(f"{PATH}/{second['id']}/input_items?order=asc")).json()
    for item in answer["data"]:
        ITEM.validate_python(item)
    assert [item["role"] for item in answer["data"]] == ["developer", "assistant", "user"]
    assert answer["data"][1]["id"] == first["output"][0]["id"]
    assert answer["data"][2]["content"] == parts
    assert (answer["object"], answer["has_more"]) == ("list", False)
    assert (answer["first_id"], answer["last_id"]) == (answer["data"][0]["id"], "msg_mine")


async def test_input_items_come_in_pages(client: httpx.AsyncClient) -> None:
    items = [{"role": "user", "content": str(i)} for i in range(5)]
    path = f"{PATH}/{(await create(client, input=items))['id']}/input_items"

    async def page(query: str) -> tuple[list[str], bool, str]:
        answer = (await client.get(f"{path}?{query}")).json()
        texts = [item["content"][0]["text"] for item in answer["data"]]
        return texts, answer["has_more"], answer["last_id"]

    texts, has_more, last = await page("limit=2")
    assert (texts, has_more) == (["4", "3"], True)
    texts, has_more, last = await page(f"limit=3&after={last}")
    assert (texts, has_more) == (["2", "1", "0"], False)
    assert (await page("order=asc&limit=1"))[0] == ["0"]
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        answer = await client.get(f"{path}?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


# --- bounds --------------------------------------------------------------------------------------


async def test_the_least_recently_used_response_goes_first(engine: FakeEngine) -> None:
    async with serving(engine, response_store_size=2) as client:
        first, second = await create(client), await create(client)
        assert await is_stored(client, first)  # used
        third = await create(client)
        assert [await is_stored(client, one) for one in (first, second, third)] == [
            True,
            False,
            True,
        ]
        await create(client, previous_response_id=first["id"], store=False)  # used
        await create(client)
        assert await is_stored(client, first)
        assert not await is_stored(client, third)
        metrics = (await client.get("/metrics")).text
    labels = '{engine="0",model_name="tiny"}'
    assert f"octavo:stored_responses{labels} 2.0" in metrics
    assert f"octavo:stored_response_evictions_total{labels} 2.0" in metrics


async def test_the_store_is_bounded_in_bytes(engine: FakeEngine) -> None:
    async with serving(engine, response_store_bytes=20_000) as client:
        small = await create(client)
        large = await create(client, input="x" * 17_000)
        assert not await is_stored(client, small)
        assert await is_stored(client, large)
        too_large = await create(client, input="x" * 30_000)
        assert not await is_stored(client, too_large)
        assert await is_stored(client, large)  # nothing went for what has no room anyway


async def test_every_response_counts_with_its_whole_conversation(engine: FakeEngine) -> None:
    async with serving(engine, response_store_bytes=50_000) as client:
        first = await create(client, input="x" * 20_000)
        second = await create(client, previous_response_id=first["id"])
        assert await is_stored(client, first)
        await create(client, previous_response_id=second["id"])
        assert not await is_stored(client, first)


async def test_a_store_of_size_0_keeps_nothing(engine: FakeEngine) -> None:
    async with serving(engine, response_store_size=0) as client:
        whole = await create(client)
        assert whole["store"] is False
        assert not await is_stored(client, whole)
        answer = await client.post(PATH, json={"input": "hi", "background": True})
        assert answer.status_code == 400
        assert "--response-store-size" in answer.json()["error"]["message"]
