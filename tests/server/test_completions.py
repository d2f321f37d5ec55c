"""POST /v1/completions: translation, whole answers and streams."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo.engine.api import TextPrompt, TokensPrompt
from octavo.engine.errors import NOTHING_LEFT

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


def frames(body: bytes) -> list[Any]:
    """The events of a stream, each decoded; checks the framing byte by byte."""
    assert body.endswith(b"data: [DONE]\n\n")
    parts = body.decode("utf-8", "strict").split("\n\n")
    assert parts.pop() == ""
    assert parts.pop() == "data: [DONE]"
    assert all(part.startswith("data: {") and "\n" not in part for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def test_whole_answer_has_the_published_shape(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, json={"model": "tiny", "prompt": "abcd"})
    assert answer.status_code == 200
    body = answer.json()
    assert body["id"].startswith("cmpl-")
    assert {key: body[key] for key in ("object", "model", "choices", "usage")} == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "Hello 🌶\n",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "END",
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_defaults_are_openais(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(PATH, json={"prompt": "x", "max_tokens": None, "temperature": None})
    sampling = engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (16, 1.0, None)


async def test_model_defaults_fill_what_is_not_given(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.default_sampling = {"temperature": 0.3, "top_p": 0.9, "max_tokens": 5}
    await client.post(PATH, json={"prompt": "x", "top_p": 0.5})
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.3, 0.5, 5)


async def test_every_sampling_field_arrives(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "seed": -(2**63),
        "stop": "a",
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.5,
        "logit_bias": {"0": 100, "49151": -100.0},
        "skip_special_tokens": False,
    }
    answer = await client.post(
        PATH, json={"prompt": "x", **fields, "max_tokens": 9, "max_completion_tokens": 5}
    )
    assert answer.status_code == 200
    sampling = engine.requests[0].sampling
    expected = {**fields, "top_k": 0, "stop": ("a",), "stop_token_ids": (3,)}
    expected |= {"logit_bias": {0: 100.0, 49151: -100.0}, "max_tokens": 5}
    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokensPrompt([1, 2])]),
        ([[1], [2, 3]], [TokensPrompt([1]), TokensPrompt([2, 3])]),
    ],
)
async def test_forms_of_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, expected: list[Any]
) -> None:
    answer = await client.post(PATH, json={"prompt": prompt})
    assert [request.prompt for request in engine.requests] == expected
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(len(expected)))
    assert len({request.request_id for request in engine.requests}) == len(expected)


async def test_add_special_tokens_may_be_off(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(PATH, json={"prompt": "a", "add_special_tokens": False})
    assert engine.requests[0].prompt == TextPrompt("a", add_special_tokens=False)


async def test_stream_chunks(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, json={"prompt": "abcd", "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = frames(answer.content)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo", " 🌶\n"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert chunks[-1]["choices"][0]["stop_reason"] == "END"
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_stream_usage_is_one_extra_chunk(client: httpx.AsyncClient) -> None:
    body = {"prompt": "abcd", "stream": True, "stream_options": {"include_usage": True}}
    chunks = frames((await client.post(PATH, json=body)).content)
    whole = (await client.post(PATH, json={"prompt": "abcd"})).json()
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None, None, None]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


async def test_stream_of_several_prompts_is_told_apart_by_index(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["a", "bb", "ccc"], "stream": True, "stream_options": {"include_usage": True}}
    chunks = frames((await client.post(PATH, json=body)).content)
    texts = ["", "", ""]
    ends = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == ["Hello 🌶\n"] * 3
    assert sorted(ends) == [0, 1, 2]
    assert chunks[-1]["usage"]["prompt_tokens"] == 6
    assert chunks[-1]["usage"]["completion_tokens"] == 9


async def test_text_that_needs_escaping_survives(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.pieces = ['"\\', "\n\ndata: x", "\x00\x1f\u2028", "龜"]
    chunks = frames((await client.post(PATH, json={"prompt": "a", "stream": True})).content)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == engine.pieces


async def test_held_back_text_sends_no_chunk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.pieces = ["", "a", "", ""]
    chunks = frames((await client.post(PATH, json={"prompt": "a", "stream": True})).content)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", ""]


@pytest.mark.parametrize(
    ("given", "expected"),
    [("abc-1.2_3", "abc-1.2_3"), ("a\tb/ü", "ab"), ("x" * 999, "x" * 64)],
)
async def test_request_id_is_taken_over_cleaned(
    client: httpx.AsyncClient, given: str, expected: str
) -> None:
    headers = {"X-Request-Id": given.encode()}
    answer = await client.post(PATH, json={"prompt": "a"}, headers=headers)  # type: ignore[arg-type]
    assert answer.json()["id"] == f"cmpl-{expected}"
    assert answer.headers["x-request-id"] == expected


async def test_equal_request_ids_do_not_meet_in_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for _ in range(2):
        await client.post(PATH, json={"prompt": "a"}, headers={"X-Request-Id": "same"})
    first, second = engine.requests
    assert first.request_id != second.request_id


@pytest.mark.parametrize("name", ["tiny", "alias/one", "", None])
async def test_served_names_and_none(client: httpx.AsyncClient, name: str | None) -> None:
    answer = await client.post(PATH, json={"prompt": "a", "model": name})
    assert (answer.status_code, answer.json()["model"]) == (200, "tiny")


async def test_neutral_values_are_accepted(client: httpx.AsyncClient) -> None:
    neutral: dict[str, Any] = {
        "n": 1,
        "best_of": 1,
        "logprobs": None,
        "echo": False,
        "suffix": None,
        "tools": [],
        "response_format": {"type": "text"},
        "use_beam_search": False,
        "bad_words": [],
        "priority": 0,
        "cache_salt": None,
        "length_penalty": 1.0,
        "user": "u",
        "store": True,
        "metadata": {"a": 1},
        "service_tier": "auto",
        "logit_bias": {},
        "stop": [],
        "stream_options": None,
    }
    answer = await client.post(PATH, json={"prompt": "a", **neutral})
    assert answer.status_code == 200


async def test_unknown_fields_are_accepted_and_warned_of_once(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        answer = await client.post(PATH, json={"prompt": "a", "temperatur": "secret", "user": "u"})
        assert answer.status_code == 200
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("octavo")]
    assert len(warnings) == 1
    assert "'temperatur'" in warnings[0]
    assert "secret" not in warnings[0]


async def test_error_ends_a_whole_answer_with_500(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.error = "The logits are not finite."
    answer = await client.post(PATH, json={"prompt": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "The logits are not finite.",
        "type": "server_error",
        "param": None,
        "code": "generation_failed",
    }


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_rules_that_leave_no_token_are_the_requests_fault(
    client: httpx.AsyncClient, engine: FakeEngine, *, is_streamed: bool
) -> None:
    engine.error = NOTHING_LEFT
    answer = await client.post(PATH, json={"prompt": "a", "stream": is_streamed})
    body = frames(answer.content)[-1] if is_streamed else answer.json()
    assert answer.status_code == (200 if is_streamed else 400)
    assert body["error"] == {
        "message": "The penalties, bias, masks and min_tokens leave no token that could be drawn.",
        "type": "invalid_request_error",
        "param": None,
        "code": "nothing_to_draw",
    }


async def test_error_ends_a_stream_with_an_event(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.error = "The logits are not finite."
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    chunks = frames((await client.post(PATH, json=body)).content)
    assert chunks[-1]["error"]["message"] == "The logits are not finite."
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["Hel", "lo"]
    assert engine.streams[0].is_aborted
