"""The Responses API with the OpenAI SDK, pointed at the real model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]
ASK: dict[str, Any] = {"model": "smol", "temperature": 0, "max_output_tokens": 24}
QUESTION = "Name the capital of France and say one thing that it is known for."


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_answer_is_the_chat_s(client: openai.OpenAI) -> None:
    made = client.responses.create(input=QUESTION, instructions="Be brief.", **ASK)
    chat = client.chat.completions.create(
        model="smol",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": QUESTION},
        ],
        temperature=0,
        max_tokens=24,
    )
    assert made.output_text == chat.choices[0].message.content
    assert "Paris" in made.output_text
    assert made.usage is not None
    assert chat.usage is not None
    assert made.usage.input_tokens == chat.usage.prompt_tokens
    assert made.usage.output_tokens == chat.usage.completion_tokens
    is_full = chat.choices[0].finish_reason == "length"
    assert made.status == ("incomplete" if is_full else "completed")


def test_streamed_and_whole_are_equal(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {**ASK, "input": QUESTION}
    ask |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    client.responses.create(**ask)  # from here on the prompt is cached
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    last = events[-1].response
    assert last.output[0].content == whole.output[0].content
    assert (last.usage, last.status) == (whole.usage, whole.status)
    told = [token for event in deltas for token in event.logprobs]
    assert len(told) == whole.usage.output_tokens
    with client.responses.stream(**ask) as stream:
        for _ in stream:
            pass
    assert client.responses.retrieve(last.id) == last


def test_a_conversation_goes_on_and_hits_the_prefix_cache(client: openai.OpenAI) -> None:
    first = client.responses.create(input=f"{QUESTION} Explain at length.", **ASK)
    second = client.responses.create(
        input="Which river flows through it?", previous_response_id=first.id, **ASK
    )
    assert first.usage is not None
    assert second.usage is not None
    shared = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens > shared
    cached = second.usage.input_tokens_details.cached_tokens
    assert (
        shared - 8 <= cached < second.usage.input_tokens
    )  # but for the seam and what a hit must save
    by_items = client.responses.create(
        input=[
            {"role": "user", "content": f"{QUESTION} Explain at length."},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Which river flows through it?"},
        ],
        **ASK,
    )
    assert by_items.output_text == second.output_text


def test_background_is_retrieved_resumed_and_cancelled(client: openai.OpenAI, server: Any) -> None:
    made = client.responses.create(input=QUESTION, background=True, **ASK)
    assert made.status == "queued"
    deadline = time.monotonic() + 60
    while client.responses.retrieve(made.id).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert client.responses.retrieve(made.id).output_text == (
        client.responses.create(input=QUESTION, **ASK).output_text
    )
    long: dict[str, Any] = {**ASK, "max_output_tokens": 4000, "extra_body": {"ignore_eos": True}}
    stream = client.responses.create(input="Count:", background=True, stream=True, **long)
    name, number = "", -1
    for event in stream:
        name = event.response.id if event.type == "response.created" else name
        number = event.sequence_number
        if event.type == "response.output_text.delta":
            break
    stream.close()
    resumed = client.responses.retrieve(name, stream=True, starting_after=number)
    assert next(iter(resumed)).sequence_number == number + 1
    ended = client.responses.cancel(name)
    assert ended.status == "cancelled"
    assert ended.output_text
    assert list(resumed)[-1].type == "response.incomplete"
    client.responses.delete(name)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(name)
    server.wait_idle(timeout_s=5)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("octavo:background_responses") == 0


def test_what_is_too_long_is_refused_or_loses_its_oldest_turns(client: openai.OpenAI) -> None:
    turn = "The quick brown fox jumps over the lazy dog. " * 100
    items: list[Any] = [{"role": "user", "content": turn}, {"role": "assistant", "content": "Yes."}]
    asked = [*items * 12, {"role": "user", "content": QUESTION}]
    ask: dict[str, Any] = {**ASK, "max_output_tokens": 4, "input": asked}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ask)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "input"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(**{**ask, "input": "x", "max_output_tokens": 100_000})
    assert unknown.value.param == "max_output_tokens"
    assert "max_output_tokens=100000" in unknown.value.message


def test_truncation_leaves_what_fits(client: openai.OpenAI) -> None:
    words = "one two three four five six seven eight nine ten " * 60
    items: list[Any] = [
        {"role": "user", "content": words},
        {"role": "assistant", "content": "Yes."},
    ]
    asked = [*items * 14, {"role": "user", "content": QUESTION}]
    made = client.responses.create(
        **{**ASK, "max_output_tokens": 2, "input": asked}, truncation="auto"
    )
    assert made.usage is not None
    assert 8192 - 700 < made.usage.input_tokens <= 8190
