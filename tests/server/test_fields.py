"""Every field that clients of this interface send is used, without effect, or refused by name."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo import server
from octavo.engine.api import SamplingParams
from octavo.server.fields import NO_EFFECT, NOT_SUPPORTED
from octavo.server.schemas import ChatCompletionRequest, CompletionRequest

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "AB"},
    CHAT: {"messages": [{"role": "user", "content": "AB"}]},
}
ROUTES = list(BODIES)

SHARED = """
model temperature top_p n max_tokens stop stream stream_options frequency_penalty presence_penalty
logit_bias logprobs seed response_format user top_k min_p repetition_penalty length_penalty
use_beam_search stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids
allowed_token_ids bad_words echo add_special_tokens structured_outputs priority request_id session_id
cache_salt kv_transfer_params ec_transfer_params vllm_xargs return_tokens_as_token_ids return_token_ids
return_token_offsets return_prompt_text return_weight_versions routed_experts_prompt_start
repetition_detection stream_interval watermarking
"""
OF_CHAT = """
messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls reasoning_effort
add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
media_io_kwargs mm_processor_kwargs thinking_token_budget include_reasoning mm_payload metadata store
service_tier
"""
OF_COMPLETIONS = "prompt prompt_embeds suffix best_of"


@pytest.mark.parametrize(
    ("schema", "names"),
    [(CompletionRequest, SHARED + OF_COMPLETIONS), (ChatCompletionRequest, SHARED + OF_CHAT)],
)
def test_every_name_of_the_interface_is_known(schema: type[Any], names: str) -> None:
    known = {*schema.model_fields, *NO_EFFECT, *NOT_SUPPORTED}
    assert [name for name in names.split() if name not in known] == []


async def post(client: httpx.AsyncClient, route: str, **fields: Any) -> httpx.Response:
    return await client.post(route, json={**BODIES[route], **fields})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# --- priority ------------------------------------------------------------------------------------

COMPUTING = {**BODIES, "/v1/responses": {"input": "AB"}, "/v1/embeddings": {"input": "AB"}}


@pytest.mark.parametrize("route", COMPUTING)
@pytest.mark.parametrize(
    ("field", "header", "expected"),
    [(None, None, 0), (7, None, 7), (-3, None, -3), (7, "-2", -2), (None, " +4 ", 4), (7, "0", 0)],
)
async def test_priority_is_the_header_s_else_the_body_s(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    route: str,
    field: int | None,
    header: str | None,
    expected: int,
) -> None:
    headers = {} if header is None else {"X-Vllm-Priority": header}
    body = {**COMPUTING[route], "priority": field}
    response = await client.post(route, json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert engine.requests[0].priority == expected


@pytest.mark.parametrize("header", ["", "high", "1.5", "1e3", str(2**63), "٣"])
async def test_a_priority_header_that_is_no_integer_is_a_400(
    client: httpx.AsyncClient, header: str
) -> None:
    headers = [(b"X-Vllm-Priority", header.encode())]
    response = await client.post(COMPLETIONS, json=BODIES[COMPLETIONS], headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"


@pytest.mark.parametrize("value", [1.5, "1", True, 2**63])
async def test_a_priority_that_is_no_integer_is_a_400(
    client: httpx.AsyncClient, value: Any
) -> None:
    response = await post(client, CHAT, priority=value)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")


# --- usage in every chunk ------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("include_usage", [True, False])
async def test_every_chunk_may_say_the_usage_so_far(
    client: httpx.AsyncClient, route: str, include_usage: bool
) -> None:
    options = {"include_usage": include_usage, "continuous_usage_stats": True}
    chunks = events(await post(client, route, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == (0 if route == CHAT else 1)
    assert counts[-1] == 3
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}
    assert (chunks[-1]["choices"] == []) is include_usage


async def test_several_prompts_share_one_usage(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["AB", "C"], "stream": True, "stream_options": options}
    chunks = events(await client.post(COMPLETIONS, json=body))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [*range(1, 7), 6]
    assert chunks[0]["usage"]["prompt_tokens"] == 3


# --- echo of a chat ------------------------------------------------------------------------------

CONTINUED = [
    {"role": "user", "content": "AB"},
    {"role": "assistant", "content": [{"type": "text", "text": "CD"}]},
]


async def test_a_chat_echoes_the_assistant_s_last_message(client: httpx.AsyncClient) -> None:
    body = {"messages": CONTINUED, "echo": True, "continue_final_message": True}
    whole = (await client.post(CHAT, json=body)).json()
    assert whole["choices"][0]["message"]["content"] == "CDHello 🌶\n"
    chunks = events(await client.post(CHAT, json={**body, "stream": True, "n": 1}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1] == {"content": "CD"}
    assert "".join(delta.get("content", "") for delta in deltas) == "CDHello 🌶\n"


async def test_a_chat_echoes_nobody_else(client: httpx.AsyncClient) -> None:
    whole = (await post(client, CHAT, echo=True)).json()
    assert whole["choices"][0]["message"]["content"] == "Hello 🌶\n"


# --- values that mean nothing, values that are refused -------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
async def test_minus_one_is_no_seed(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    assert (await post(client, route, seed=-1)).status_code == 200
    assert engine.requests[0].sampling.seed is None


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"spaces_between_special_tokens": False},
        {"spaces_between_special_tokens": True},
        {"request_id": "r", "session_id": "s", "parallel_tool_calls": False},
        {"suffix": "", "response_format": {"type": "text"}, "logit_bias": {}},
        {"temperature": 0, "n": 3},
        {"priority": 0, "stop": None, "stream_options": None, "best_of": None},
    ],
)
async def test_what_asks_for_nothing_is_accepted(
    client: httpx.AsyncClient, route: str, fields: dict[str, Any]
) -> None:
    response = await post(client, route, **fields)
    assert response.status_code == 200, response.text
    assert "warning" not in response.text


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (COMPLETIONS, {"suffix": " end"}, "suffix"),
        (COMPLETIONS, {"prompt_embeds": "AA=="}, "prompt_embeds"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"chat_template": "{{ messages }}"}, "chat_template"),
        (CHAT, {"documents": [{"text": "a"}]}, "documents"),
        (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, None),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(
    client: httpx.AsyncClient,
    route: str,
    fields: dict[str, Any],
    param: str | None,
    is_streamed: bool,
) -> None:
    response = await post(client, route, stream=is_streamed, **fields)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["param"] == (param or "continue_final_message")


# --- the model's own defaults --------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
async def test_the_model_s_defaults_apply_and_show(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    engine.default_sampling = {"temperature": 0.25, "top_k": 7}
    await post(client, route, top_k=9)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k) == (0.25, 9)
    (card, _) = (await client.get("/v1/models")).json()["data"]
    assert card["default_sampling_params"] == {"temperature": 0.25, "top_k": 7}
    rendered = (await client.post(f"{route}/render", json=BODIES[route])).json()
    shown = rendered[0] if isinstance(rendered, list) else rendered
    assert shown["sampling_params"]["temperature"] == 0.25


def _listed_names(path: Path) -> Iterator[set[str]]:
    """The texts of each list, tuple and set that a module spells out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            parts = [part.value for part in node.elts if isinstance(part, ast.Constant)]
            yield {part for part in parts if isinstance(part, str)}


def test_no_route_lists_the_sampling_fields_anew() -> None:
    """A field of ``SamplingParams`` that a list here lacked would be dropped in silence."""
    names = {field.name for field in fields(SamplingParams)}
    paths = sorted(Path(server.__path__[0]).glob("*.py"))
    assert len(paths) > 10
    assert [
        path.name for path in paths for listed in _listed_names(path) if len(listed & names) > 8
    ] == []
