"""Every wrong request gets a 4xx in one shape, the same with and without ``stream``."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo.engine.errors import OverloadedError
from octavo.server.fields import NOT_SUPPORTED
from octavo.server.limits import MAX_BODY_BYTES

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/hit"}}
C, X = "/v1/completions", "/v1/chat/completions"

# (path, fields, status, param)
CASES: list[tuple[str, dict[str, Any], int, str | None]] = [
    # prompts
    (C, {"prompt": None}, 400, "prompt"),
    (C, {"prompt": ""}, 400, "prompt"),
    (C, {"prompt": []}, 400, "prompt"),
    (C, {"prompt": [""]}, 400, "prompt"),
    (C, {"prompt": ["ok", ""]}, 400, "prompt"),
    (C, {"prompt": [[]]}, 400, "prompt"),
    (C, {"prompt": ["a", 1]}, 400, "prompt"),
    (C, {"prompt": [True]}, 400, "prompt"),
    (C, {"prompt": [[1, "a"]]}, 400, "prompt"),
    (C, {"prompt": [1.0]}, 400, "prompt"),
    (C, {"prompt": 7}, 400, "prompt"),
    (C, {"prompt": {"a": 1}}, 400, "prompt"),
    (C, {"prompt": ["a"] * 1025}, 400, "prompt"),
    (C, {"prompt": [100]}, 400, "prompt"),
    (C, {"prompt": [-1]}, 400, "prompt"),
    (C, {"prompt": [[1, 2], [4999]]}, 400, "prompt"),
    # numbers
    (C, {"temperature": -1}, 400, "temperature"),
    (C, {"temperature": 2.1}, 400, "temperature"),
    (C, {"temperature": "1"}, 400, "temperature"),
    (C, {"temperature": True}, 400, "temperature"),
    (C, {"top_p": 0}, 400, "top_p"),
    (C, {"top_k": -2}, 400, "top_k"),
    (C, {"top_k": 1.5}, 400, "top_k"),
    (C, {"min_p": 1.1}, 400, "min_p"),
    (C, {"seed": 2**63}, 400, "seed"),
    (C, {"seed": 1.0}, 400, "seed"),
    (C, {"max_tokens": 0}, 400, "max_tokens"),
    (C, {"max_tokens": -1}, 400, "max_tokens"),
    (C, {"max_tokens": "5"}, 400, "max_tokens"),
    (C, {"max_tokens": 10**30}, 400, "max_tokens"),
    (X, {"max_completion_tokens": 0, "max_tokens": 5}, 400, "max_completion_tokens"),
    (C, {"max_tokens": 2, "min_tokens": 3}, 400, "min_tokens"),
    (C, {"presence_penalty": 3}, 400, "presence_penalty"),
    (C, {"frequency_penalty": -3}, 400, "frequency_penalty"),
    (C, {"repetition_penalty": 0}, 400, "repetition_penalty"),
    (C, {"logit_bias": {"-1": 5}}, 400, "logit_bias"),
    (C, {"logit_bias": {"abc": 5}}, 400, "logit_bias"),
    (C, {"logit_bias": {"1e3": 5}}, 400, "logit_bias"),
    (C, {"logit_bias": {" 7": 5}}, 400, "logit_bias"),
    (C, {"logit_bias": {"٣": 5}}, 400, "logit_bias"),
    (C, {"logit_bias": {"5": 101}}, 400, "logit_bias"),
    (C, {"logit_bias": {"5": None}}, 400, "logit_bias"),
    (C, {"logit_bias": {"5": True}}, 400, "logit_bias"),
    (C, {"logit_bias": [1]}, 400, "logit_bias"),
    # stops
    (C, {"stop": ""}, 400, "stop"),
    (C, {"stop": ["a", ""]}, 400, "stop"),
    (C, {"stop": ["x"] * 5}, 400, "stop"),
    (C, {"stop": [1]}, 400, "stop[0]"),
    (C, {"stop": 1}, 400, "stop"),
    (C, {"stop": "a" * 10000}, 400, "stop"),
    (C, {"stop_token_ids": ["a"]}, 400, "stop_token_ids[0]"),
    (C, {"ignore_eos": "yes"}, 400, "ignore_eos"),
    # streams
    (C, {"stream": "true"}, 400, "stream"),
    (C, {"stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage"),
    (
        C,
        {"stream": True, "stream_options": {"continuous_usage_stats": "yes"}},
        400,
        "stream_options.continuous_usage_stats",
    ),
    # models
    (C, {"model": "no-such"}, 404, "model"),
    (X, {"model": "TINY"}, 404, "model"),
    (X, {"model": 5}, 400, "model"),
    # not supported
    (C, {"n": 0}, 400, "n"),
    (C, {"n": 16385}, 400, "n"),
    (C, {"n": True}, 400, "n"),
    (C, {"n": "1"}, 400, "n"),
    (C, {"n": 1.0}, 400, "n"),
    # several answers
    (C, {"best_of": 0}, 400, "best_of"),
    (C, {"best_of": 16385}, 400, "best_of"),
    (C, {"best_of": "2"}, 400, "best_of"),
    (X, {"n": 3, "best_of": 2}, 400, "best_of"),
    (C, {"use_beam_search": 1}, 400, "use_beam_search"),
    (C, {"use_beam_search": True, "n": 2, "stop": "a"}, 400, "stop"),
    (X, {"use_beam_search": True, "n": 2, "stop": ["a"]}, 400, "stop"),
    (C, {"use_beam_search": True, "temperature": 0.5}, 400, "temperature"),
    (C, {"use_beam_search": True, "top_p": 0.5}, 400, "top_p"),
    (C, {"use_beam_search": True, "top_k": 5}, 400, "top_k"),
    (C, {"use_beam_search": True, "min_p": 0.5}, 400, "min_p"),
    (C, {"length_penalty": "1"}, 400, "length_penalty"),
    (C, {"length_penalty": True}, 400, "length_penalty"),
    (C, {"length_penalty": -50.5}, 400, "length_penalty"),
    (C, {"early_stopping": 1}, 400, "early_stopping"),
    (X, {"early_stopping": "always"}, 400, "early_stopping"),
    (C, {"early_stopping": [True]}, 400, "early_stopping"),
    (C, {"cache_salt": 5}, 400, "cache_salt"),
    (X, {"cache_salt": ["a"]}, 400, "cache_salt"),
    # masks and cuts
    (C, {"allowed_token_ids": []}, 400, "allowed_token_ids"),
    (C, {"allowed_token_ids": ["1"]}, 400, "allowed_token_ids[0]"),
    (C, {"allowed_token_ids": 5}, 400, "allowed_token_ids"),
    (C, {"bad_words": [""]}, 400, "bad_words"),
    (C, {"bad_words": [" "]}, 400, "bad_words"),
    (C, {"bad_words": "x"}, 400, "bad_words"),
    (C, {"bad_words": ["x"] * 129}, 400, "bad_words"),
    (X, {"bad_words": ["x" * 1025]}, 400, "bad_words"),
    (C, {"truncate_prompt_tokens": 1.5}, 400, "truncate_prompt_tokens"),
    (C, {"truncation_side": "middle"}, 400, "truncation_side"),
    # log-probabilities
    (C, {"logprobs": -2}, 400, "logprobs"),
    (C, {"logprobs": True}, 400, "logprobs"),
    (C, {"logprobs": "1"}, 400, "logprobs"),
    (C, {"top_logprobs": 1}, 400, "top_logprobs"),
    (C, {"prompt_logprobs": -2}, 400, "prompt_logprobs"),
    (C, {"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    (C, {"use_beam_search": True, "n": 2, "logprobs": 1, "echo": True}, 400, "echo"),
    (C, {"logprobs": 1, "logprob_token_ids": [5], "echo": True}, 400, "echo"),
    (C, {"logprob_token_ids": [5]}, 400, "logprob_token_ids"),
    (X, {"logprob_token_ids": [5], "logprobs": False}, 400, "logprob_token_ids"),
    (X, {"logprob_token_ids": [0] * 129, "logprobs": True}, 400, "logprob_token_ids"),
    (X, {"logprob_token_ids": ["5"], "logprobs": True}, 400, "logprob_token_ids[0]"),
    (C, {"use_beam_search": True, "prompt_logprobs": 0, "stream": False}, 400, "prompt_logprobs"),
    (C, {"use_beam_search": True, "echo": True, "max_tokens": 0}, 400, "max_tokens"),
    (C, {"echo": 1}, 400, "echo"),
    (C, {"max_tokens": 0, "logprobs": 1}, 400, "max_tokens"),
    (C, {"max_tokens": -1, "echo": True}, 400, "max_tokens"),
    (C, {"return_token_ids": 1}, 400, "return_token_ids"),
    (C, {"return_tokens_as_token_ids": "x"}, 400, "return_tokens_as_token_ids"),
    (X, {"logprobs": 1}, 400, "logprobs"),
    (X, {"top_logprobs": 2}, 400, "top_logprobs"),
    (X, {"logprobs": False, "top_logprobs": 3}, 400, "top_logprobs"),
    (X, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (X, {"logprobs": True, "top_logprobs": -1}, 400, "top_logprobs"),
    (X, {"logprobs": True, "top_logprobs": True}, 400, "top_logprobs"),
    (X, {"max_tokens": 0, "logprobs": True}, 400, "max_tokens"),
    (X, {"echo": "yes"}, 400, "echo"),
    (C, {"suffix": "x"}, 400, "suffix"),
    (X, {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
    (X, {"response_format": {"type": "json_object"}}, 400, "response_format"),
    (X, {"guided_json": {}}, 400, "guided_json"),
    (X, {"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, 400, "chat_template"),
    (X, {"add_special_tokens": 1}, 400, "add_special_tokens"),
    # messages
    (X, {"messages": None}, 400, "messages"),
    (X, {"messages": []}, 400, "messages"),
    (X, {"messages": {"role": "user"}}, 400, "messages"),
    (X, {"messages": ["hi"]}, 400, "messages[0]"),
    (X, {"messages": [{"content": "a"}]}, 400, "messages[0].role"),
    (X, {"messages": [{"role": "wizard", "content": "a"}]}, 400, "messages[0].role"),
    (X, {"messages": [{"role": [], "content": "a"}]}, 400, "messages[0].role"),
    (X, {"messages": [*HI, {"role": "user"}]}, 400, "messages[1].content"),
    (X, {"messages": [{"role": "assistant", "content": None}]}, 400, "messages[0].content"),
    (X, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (X, {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "messages[0].content[0]"),
    (X, {"messages": [{"role": "user", "content": [5]}]}, 400, "messages[0].content[0]"),
    (
        X,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        400,
        "messages[0].content[0].text",
    ),
    (
        X,
        {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]},
        400,
        "messages[0].tool_calls",
    ),
    (
        X,
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        400,
        "messages[0].tool_calls[0].function",
    ),
    (
        X,
        {"continue_final_message": True, "add_generation_prompt": True},
        400,
        "continue_final_message",
    ),
    (X, {"chat_template_kwargs": 5}, 400, "chat_template_kwargs"),
]


def check_shape(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


@pytest.mark.parametrize("stream", [None, True])
@pytest.mark.parametrize(("path", "fields", "status", "param"), CASES)
async def test_bad_fields(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    fields: dict[str, Any],
    status: int,
    param: str | None,
    stream: bool | None,
) -> None:
    body: dict[str, Any] = {"prompt": "a"} if path == C else {"messages": HI}
    if stream is not None:
        body["stream"] = stream
    answer = await client.post(path, json=body | fields)
    assert answer.status_code == status, answer.text
    assert check_shape(answer)["param"] == param
    assert engine.requests == []


@pytest.mark.parametrize("name", sorted(NOT_SUPPORTED))
@pytest.mark.parametrize("path", [C, X])
async def test_every_field_that_is_not_offered_is_named(
    client: httpx.AsyncClient, path: str, name: str
) -> None:
    body = {"prompt": "a"} if path == C else {"messages": HI}
    error = check_shape(await client.post(path, json={**body, name: {"some": "thing"}}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert name in error["message"]
    assert (await client.post(path, json={**body, name: None})).status_code == 200


async def test_stream_options_need_a_stream(client: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    answer = await client.post(C, json=body)
    assert (answer.status_code, check_shape(answer)["param"]) == (400, "stream_options")


@pytest.mark.parametrize(
    "fields", [{"best_of": 2}, {"n": 2, "best_of": 3}, {"use_beam_search": True, "n": 2}]
)
@pytest.mark.parametrize("path", [C, X])
async def test_what_is_known_at_the_end_only_cannot_be_streamed(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    body = {"prompt": "a"} if path == C else {"messages": HI}
    answer = await client.post(path, json={**body, **fields, "stream": True})
    assert (answer.status_code, check_shape(answer)["param"]) == (400, "stream")
    assert engine.requests == []
    assert (await client.post(path, json={**body, **fields, "stream": False})).status_code == 200


async def test_missing_messages_are_required(client: httpx.AsyncClient) -> None:
    error = check_shape(await client.post(X, json={}))
    assert error["message"] == "messages is required."


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"x"',
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\\ud800x"}',
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":"a"} trailing',
    ],
)
async def test_bodies_that_are_not_a_json_object(client: httpx.AsyncClient, raw: bytes) -> None:
    answer = await client.post(C, content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert check_shape(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("", 415),
    ],
)
async def test_content_types(client: httpx.AsyncClient, content_type: str, status: int) -> None:
    headers = {"Content-Type": content_type}
    answer = await client.post(C, content=b'{"prompt":"a"}', headers=headers)
    assert answer.status_code == status
    if status != 200:
        assert check_shape(answer)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_over_the_limit(client: httpx.AsyncClient, is_chunked: bool) -> None:
    piece = b" " * (1 << 20)

    async def pieces() -> Any:
        for _ in range(MAX_BODY_BYTES // len(piece) + 1):
            yield piece

    content = pieces() if is_chunked else piece * (MAX_BODY_BYTES // len(piece) + 1)
    answer = await client.post(C, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert check_shape(answer)["code"] == "request_too_large"


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_client_that_sends_it_all_first_sees_the_refusal(
    url: str, *, is_chunked: bool
) -> None:
    size = 2 * MAX_BODY_BYTES
    head, body = f"Content-Length: {size}", b" " * size
    if is_chunked:
        head, body = "Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (size, body)
    lines = [f"POST {C} HTTP/1.1", "Host: x", "Content-Type: application/json", head, "", ""]
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    writer.write("\r\n".join(lines).encode() + body)
    await writer.drain()  # refuses to go on where the connection was reset
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    assert b"request_too_large" in await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/V1/models", 404),
        ("POST", "/chat/completions", 404),
        ("POST", "/v1/v1/chat/completions", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/no-such", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
    ],
)
async def test_unknown_paths_and_methods(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    answer = await client.send(client.build_request(method, f"http://octavo{path}"))
    assert answer.status_code == status
    error = check_shape(answer)
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    if status == 405:
        assert answer.headers["allow"]


async def test_unknown_model_names_those_served(client: httpx.AsyncClient) -> None:
    error = check_shape(await client.post(C, json={"prompt": "a", "model": "no-such"}))
    assert error["code"] == "model_not_found"
    assert "tiny, alias/one" in error["message"]


async def test_overload_says_when_to_come_back(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_requests: Any) -> Any:
        raise OverloadedError(
            "Too much is queued.", reason="max_num_queued_tokens", retry_after_s=2.5
        )

    monkeypatch.setattr(engine, "submit", refuse)
    answer = await client.post(C, json={"prompt": "a", "stream": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert check_shape(answer)["type"] == "rate_limit_error"
    metrics = (await client.get("/metrics")).text
    counted = 'admission_rejections_total{model_name="tiny",reason="max_num_queued_tokens"} 1.0'
    assert counted in metrics


async def test_the_unexpected_leaks_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_requests: Any) -> Any:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(engine, "submit", fail)
    answer = await client.post(C, json={"prompt": "a"}, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "mine"
    assert int(answer.headers["openai-processing-ms"]) >= 0
    assert check_shape(answer)["code"] == "internal_error"
    assert "secret" not in answer.text


async def test_served_schema_describes_both_bodies(client: httpx.AsyncClient) -> None:
    document = json.loads((await client.get("/openapi.json")).content)
    for path, field in ((C, "prompt"), (X, "messages")):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        assert field in content["application/json"]["schema"]["properties"]
