"""The official OpenAI SDK's view of the Responses API, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
TEXT = "Hello 🌶\n"


@pytest.fixture
async def sdk(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def test_create_retrieve_delete(sdk: openai.AsyncOpenAI) -> None:
    made = await sdk.responses.create(model="tiny", input="hi", metadata={"a": "b"})
    assert made.output_text == TEXT
    assert made.status == "completed"
    assert made.usage is not None
    assert made.usage.input_tokens_details.cached_tokens == 3
    assert made.usage.output_tokens_details.reasoning_tokens == 0
    assert await sdk.responses.retrieve(made.id) == made
    await sdk.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match=made.id):
        await sdk.responses.retrieve(made.id)


async def test_a_stream_of_events(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.responses.create(model="tiny", input="hi", stream=True)
    events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == ["Hel", "lo", " 🌶\n"]
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == TEXT


async def test_the_stream_helper_puts_the_response_together(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.responses.stream(model="tiny", input="hi") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == TEXT


async def test_a_conversation_goes_on_by_id_and_by_items(sdk: openai.AsyncOpenAI) -> None:
    first = await sdk.responses.create(model="tiny", input="one")
    second = await sdk.responses.create(model="tiny", input="two", previous_response_id=first.id)
    history: list[Any] = [{"role": "user", "content": "one"}]
    history += [item.model_dump(exclude_none=True) for item in first.output]
    by_items = await sdk.responses.create(
        model="tiny", input=[*history, {"role": "user", "content": "two"}]
    )
    assert second.usage is not None
    assert by_items.usage == second.usage
    items = [item async for item in sdk.responses.input_items.list(second.id, limit=1)]
    assert [getattr(item, "role", None) for item in items] == ["user", "assistant", "user"]
    with pytest.raises(openai.BadRequestError) as unknown:
        await sdk.responses.create(model="tiny", input="x", previous_response_id="resp_x")
    assert unknown.value.param == "previous_response_id"
    assert unknown.value.code == "previous_response_not_found"


async def test_background_cancel_and_resume(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.hold_at = 2
    made = await sdk.responses.create(model="tiny", input="hi", background=True)
    assert made.status == "queued"
    ended = await sdk.responses.cancel(made.id)
    assert ended.status == "cancelled"
    assert engine.streams[0].is_aborted
    stream = await sdk.responses.create(model="tiny", input="hi", background=True, stream=True)
    name, number = "", -1
    async for event in stream:
        if event.type == "response.created":
            name = event.response.id
        number = event.sequence_number
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    engine.released.set()
    rest = await sdk.responses.retrieve(name, stream=True, starting_after=number)
    events = [event async for event in rest]
    assert events[0].sequence_number == number + 1
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == TEXT


async def test_log_probabilities(sdk: openai.AsyncOpenAI) -> None:
    made = await sdk.responses.create(
        model="tiny", input="hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    (item,) = made.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [len(one.top_logprobs) for one in part.logprobs] == [2] * 3
