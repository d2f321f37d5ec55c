"""The official OpenAI SDK against a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
HI: Any = [{"role": "user", "content": "hi"}]
TEXT = "Hello 🌶\n"


@pytest.fixture(params=["", "/"])
async def sdk(url: str, request: pytest.FixtureRequest) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"{url}/v1{request.param}"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


async def test_completions(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model="tiny", prompt="abcd")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == 7


async def test_streamed_completions(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.completions.create(model="tiny", prompt="abcd", stream=True)
    assert [chunk.choices[0].text async for chunk in stream] == ["Hel", "lo", " 🌶\n"]


async def test_chat(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="alias/one", messages=HI)
    assert answer.model == "tiny"
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_streamed_chat(sdk: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True}
    stream = await sdk.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [3]


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["tiny", "alias/one"]
    assert (await sdk.models.retrieve("alias/one")).created > 0


async def test_errors_carry_their_message(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.completions.create(model="tiny", prompt="")
    assert (bad.value.param, bad.value.type) == ("prompt", "invalid_request_error")
    assert "must not be empty" in bad.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.chat.completions.create(model="no-such", messages=HI)
    assert missing.value.code == "model_not_found"
    engine.is_ready = False
    with pytest.raises(openai.InternalServerError) as loading:
        await sdk.chat.completions.create(model="tiny", messages=HI)
    assert loading.value.status_code == 503


async def test_an_error_in_mid_stream_is_raised(
    sdk: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    engine.error = "The logits are not finite."
    stream = await sdk.chat.completions.create(model="tiny", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="not finite"):
        _ = [chunk async for chunk in stream]


async def test_leaving_a_stream_aborts_it(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.hold_at = 2
    stream = await sdk.chat.completions.create(model="tiny", messages=HI, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await sdk.models.list()  # the loop turns
    assert engine.streams[0].is_aborted


async def test_log_probabilities_in_both_shapes(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model="tiny", prompt="abcd", logprobs=1, echo=True)
    legacy = answer.choices[0].logprobs
    assert legacy is not None
    assert legacy.tokens == ["a", "b", "c", "d", "\x07", "\x07", "\x07"]
    chat = await sdk.chat.completions.create(
        model="tiny", messages=HI, logprobs=True, top_logprobs=2
    )
    shaped = chat.choices[0].logprobs
    assert shaped is not None
    assert shaped.content is not None
    assert [one.logprob for one in shaped.content] == [-3.0] * 3
    assert [len(one.top_logprobs) for one in shaped.content] == [2] * 3
    stream = await sdk.chat.completions.create(
        model="tiny", messages=HI, logprobs=True, stream=True
    )
    told = [chunk.choices[0].logprobs async for chunk in stream]
    assert [one.content for one in told if one is not None and one.content] == [
        [token.model_copy(update={"top_logprobs": []})] for token in shaped.content
    ]
