"""POST /v1/chat/completions: messages, whole answers and streams."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo.engine.api import ChatPrompt

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def frames(body: bytes) -> list[Any]:
    parts = body.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def rendered(client: httpx.AsyncClient, engine: FakeEngine, **body: Any) -> ChatPrompt:
    answer = await client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


async def test_whole_answer_has_the_published_shape(client: httpx.AsyncClient) -> None:
    body = (await client.post(PATH, json={"messages": HI})).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello 🌶\n", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "END",
        }
    ]


async def test_max_tokens_is_by_default_the_rest_of_the_window(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.post(PATH, json={"messages": HI})
    assert engine.requests[0].sampling.max_tokens is None


async def test_stream_begins_with_the_role_and_ends_with_an_empty_delta(
    client: httpx.AsyncClient,
) -> None:
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    chunks = frames((await client.post(PATH, json=body)).content)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {"content": " 🌶\n"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None, None, None, None, "stop"]
    assert [chunk["usage"] is None for chunk in chunks] == [True] * 5 + [False]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


@pytest.mark.parametrize(
    "content",
    ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ["a", "b"]],
)
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
async def test_text_is_the_same_in_every_form(
    client: httpx.AsyncClient, engine: FakeEngine, role: str, content: Any
) -> None:
    prompt = await rendered(client, engine, messages=[{"role": role, "content": content}])
    assert prompt.messages == [{"role": "system" if role == "developer" else role, "content": "ab"}]


@pytest.mark.parametrize("content", ["", []])
async def test_empty_content_is_legal(
    client: httpx.AsyncClient, engine: FakeEngine, content: Any
) -> None:
    messages = [{"role": "user", "content": content}, *HI]
    prompt = await rendered(client, engine, messages=messages)
    assert prompt.messages[0]["content"] == ""


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": "I ask: "}])
async def test_past_tool_calls_become_text(
    client: httpx.AsyncClient, engine: FakeEngine, content: dict[str, Any]
) -> None:
    messages = [
        *HI,
        {"role": "assistant", "tool_calls": [CALL], **content},
        {"role": "tool", "content": "42", "tool_call_id": "c", "name": "f"},
    ]
    prompt = await rendered(client, engine, messages=messages)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    text = (content.get("content") or "") + call
    assert prompt.messages[1] == {"role": "assistant", "content": text}
    assert prompt.messages[2] == {
        "role": "tool",
        "content": "42",
        "tool_call_id": "c",
        "name": "f",
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, False)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"continue_final_message": True, "add_generation_prompt": False}, (False, True)),
    ],
)
async def test_how_the_conversation_goes_on(
    client: httpx.AsyncClient, engine: FakeEngine, fields: Any, expected: tuple[bool, bool]
) -> None:
    prompt = await rendered(client, engine, messages=HI, **fields)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == expected


async def test_template_arguments_arrive(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    kwargs = {"enable_thinking": False}
    prompt = await rendered(client, engine, messages=HI, chat_template_kwargs=kwargs)
    assert prompt.template_kwargs == kwargs
