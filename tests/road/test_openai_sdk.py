"""The OpenAI SDK, pointed at the real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completion_streamed_and_whole_are_equal(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "smol",
        "prompt": "The capital of France is",
        "max_tokens": 12,
        "temperature": 0,
    }
    client.completions.create(**ask)  # from here on the prompt is cached
    whole = client.completions.create(**ask)
    stream = client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "Paris" in whole.choices[0].text
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12


def test_chat_streams_with_the_role_first(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="alias",
        messages=[{"role": "user", "content": "Name the capital of France."}],
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_characters_of_several_tokens_arrive_whole(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "smol",
        "prompt": "🌶🌶🌶🌶🌶🌶🌶🌶",
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = client.completions.create(**ask).choices[0].text
    deltas = [c.choices[0].text for c in client.completions.create(**ask, stream=True)]
    assert "".join(deltas) == whole
    assert "🌶" in whole
    assert not any("\ufffd" in delta for delta in deltas)


def test_seeded_samples_repeat_and_unseeded_ones_do_not(client: openai.OpenAI) -> None:
    def sample(seed: int | None) -> str:
        ask: dict[str, Any] = {
            "model": "smol",
            "prompt": "Once upon a time",
            "max_tokens": 24,
            "temperature": 1,
        }
        return str(client.completions.create(**ask, seed=seed).choices[0].text)

    assert sample(123) == sample(123) != sample(124)
    assert sample(None) != sample(None)


def test_errors_are_the_sdk_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.completions.create(model="no-such", prompt="x")
    assert "smol" in not_found.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="smol", prompt="x", logprobs=21)
    assert refused.value.param == "logprobs"
    assert {model.id for model in client.models.list()} == {"smol", "alias"}


def test_stop_string_that_is_a_special_token_stops(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "smol",
        "messages": [{"role": "user", "content": "Say hi"}],
        "temperature": 0,
        "max_tokens": 64,
    }
    plain = client.chat.completions.create(**ask)
    stopped = client.chat.completions.create(
        **ask, stop=["<|im_end|>"], extra_body={"ignore_eos": True}
    )
    assert plain.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == plain.choices[0].message.content
    assert stopped.choices[0].finish_reason == "stop"


def test_nobody_is_left_running(server: Any, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="smol",
        prompt="Count:",
        max_tokens=4000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _ in range(3):
        next(iter(stream))
    stream.close()
    server.wait_idle(timeout_s=5)
    assert server.metric("vllm:num_requests_running") == 0
