"""The official Python SDK: each refusal is the exception class that programs catch."""

from __future__ import annotations

from typing import Any

import openai
import pytest

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"no": 1}}, "logit_bias"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
    ],
)
def test_a_wrong_field_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "smol", "messages": HI, **fields})
    assert (caught.value.status_code, caught.value.param) == (400, param)
    assert caught.value.type == "invalid_request_error"
    assert param.partition("[")[0] in caught.value.message
    assert caught.value.request_id


def test_a_prompt_beyond_the_window(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smol", prompt="word " * 2000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


def test_suffix_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smol", prompt="a", suffix="b")
    assert (caught.value.param, caught.value.code) == ("suffix", "unsupported_parameter")


def test_a_wrong_key(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.models.list()
        assert caught.value.code == "invalid_api_key"


def test_unknown_models(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such", messages=HI)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such")


def test_an_unknown_route(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.moderations.create(input="a")
    assert caught.value.code == "not_found"


def test_a_body_that_is_too_large(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="smol", prompt="a" * (9 << 20))
    assert caught.value.status_code == 413
    body: Any = caught.value.body
    assert body["code"] == "request_too_large"


def test_what_leaves_nothing_to_draw(client: openai.OpenAI) -> None:
    extra = {"min_tokens": 1, "allowed_token_ids": [2], "stop_token_ids": [2]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smol", prompt="a", extra_body=extra)
    assert caught.value.code == "nothing_to_draw"
    stream = client.completions.create(model="smol", prompt="a", extra_body=extra, stream=True)
    with pytest.raises(openai.APIError, match="no token that could be drawn"):
        list(stream)


def test_a_server_that_is_not_there() -> None:
    with (
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="a", max_retries=0) as nobody,
        pytest.raises(openai.APIConnectionError),
    ):
        nobody.models.list()
