"""The official Python SDK: chat completions, whole and streamed, and the async client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

HI: Any = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What is the capital of France? Answer in one word."},
]
GREEDY: dict[str, Any] = {"model": "smol", "temperature": 0, "max_completion_tokens": 8}


@pytest.fixture(scope="module")
def greedy(client: openai.OpenAI) -> str:
    """What the model answers."""
    answer = client.chat.completions.create(messages=HI, **GREEDY)
    content: str | None = answer.choices[0].message.content
    assert content
    return content


def test_whole(client: openai.OpenAI, greedy: str) -> None:
    answer = client.chat.completions.create(messages=HI, **GREEDY)
    message = answer.choices[0].message
    assert (answer.object, answer.model, message.role) == ("chat.completion", "smol", "assistant")
    assert (message.content, message.tool_calls, message.refusal) == (greedy, None, None)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed(client: openai.OpenAI, greedy: str) -> None:
    options: Any = {"include_usage": True}
    whole = client.chat.completions.create(messages=HI, **GREEDY)
    stream = client.chat.completions.create(
        messages=HI, stream=True, stream_options=options, **GREEDY
    )
    *chunks, last = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert [delta.role for delta in deltas[1:]] == [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == greedy
    assert deltas[-1].model_dump(exclude_none=True) == {}
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (last.choices, last.usage is not None) == ([], True)
    assert whole.usage is not None
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_the_streaming_helper(client: openai.OpenAI, greedy: str) -> None:
    with client.chat.completions.stream(messages=HI, **GREEDY) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert said == greedy == final.choices[0].message.content


def test_several_choices_streamed(client: openai.OpenAI) -> None:
    fields: Any = {**GREEDY, "temperature": 1.0, "seed": 3, "n": 2}
    whole = client.chat.completions.create(messages=HI, **fields)
    texts = ["", ""]
    for chunk in client.chat.completions.create(messages=HI, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]


def test_log_probabilities(client: openai.OpenAI, greedy: str) -> None:
    told = (
        client.chat.completions.create(messages=HI, logprobs=True, top_logprobs=3, **GREEDY)
        .choices[0]
        .logprobs
    )
    assert told is not None
    assert told.content is not None
    for token in told.content:
        assert [len(token.top_logprobs), token.top_logprobs[0].token] == [3, token.token]
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    data = b"".join(bytes(token.bytes or []) for token in told.content)
    assert data.decode().startswith(greedy)
    stream = client.chat.completions.create(
        messages=HI, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [token for part in parts if part for token in part.content or []] == told.content


def test_content_in_parts_and_other_roles(client: openai.OpenAI, greedy: str) -> None:
    messages: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "Answer in one word."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is the capital"},
                {"type": "text", "text": " of France?"},
            ],
        },
    ]
    answer = client.chat.completions.create(messages=messages, **GREEDY)
    assert answer.choices[0].message.content == greedy


def test_a_conversation_with_a_tools_answer(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
    ]
    answer = client.chat.completions.create(messages=messages, **GREEDY)
    assert answer.choices[0].message.content


def test_a_message_is_continued(client: openai.OpenAI) -> None:
    messages = [*HI, {"role": "assistant", "content": "The capital of France is"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(messages=messages, extra_body=extra, **GREEDY)
    assert "Paris" in (answer.choices[0].message.content or "")


def test_stop_and_fields_without_effect(client: openai.OpenAI, greedy: str) -> None:
    answer = client.chat.completions.create(
        messages=HI, stop=[greedy[2:]], user="u", metadata={"a": "b"}, store=False, **GREEDY
    )
    assert answer.choices[0].message.content == greedy[:2]
    assert answer.choices[0].finish_reason == "stop"


def test_answers_carry_the_clients_request_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        messages=HI, extra_headers={"X-Request-Id": "mine-1"}, **GREEDY
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert int(raw.headers["openai-processing-ms"]) >= 0
    answer = raw.parse()
    assert (answer.id, answer._request_id) == ("chatcmpl-mine-1", "mine-1")


@pytest.fixture
async def async_client(base_url: str, api_key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """The asynchronous SDK."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as one:
        yield one


@pytest.fixture
def anyio_backend() -> str:
    """The loop of the asynchronous tests."""
    return "asyncio"


@pytest.mark.anyio
async def test_the_async_client(async_client: openai.AsyncOpenAI, greedy: str) -> None:
    async def whole() -> str | None:
        answer = await async_client.chat.completions.create(messages=HI, **GREEDY)
        content: str | None = answer.choices[0].message.content
        return content

    async def streamed() -> str:
        stream = await async_client.chat.completions.create(messages=HI, stream=True, **GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    found = await asyncio.gather(*[one() for one in (whole, streamed) for _ in range(4)])
    assert found == [greedy] * 8


@pytest.mark.anyio
async def test_leaving_a_stream_frees_its_memory(
    async_client: openai.AsyncOpenAI, server: Any
) -> None:
    fields: Any = {**GREEDY, "max_completion_tokens": 900}
    stream = await async_client.chat.completions.create(
        messages=HI, stream=True, extra_body={"ignore_eos": True}, **fields
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert server.metric("vllm:num_requests_running") == 1
    await stream.close()
    server.wait_idle()
    assert server.metric("octavo:kv_blocks_used") == 0


@pytest.mark.anyio
async def test_a_timeout_gives_the_request_up(
    async_client: openai.AsyncOpenAI, server: Any
) -> None:
    fields: Any = {**GREEDY, "max_completion_tokens": 900, "timeout": 0.5}
    with pytest.raises(openai.APITimeoutError):
        await async_client.chat.completions.create(
            messages=HI, extra_body={"ignore_eos": True}, **fields
        )
    server.wait_idle()
    assert server.metric("octavo:kv_blocks_used") == 0
