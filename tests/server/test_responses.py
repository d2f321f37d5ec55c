"""POST /v1/responses: input, whole answers, what is told and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai.types.responses import Response

from octavo.engine.api import ChatPrompt
from octavo.server.responses_examples import RESPONSE

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
TEXT = "Hello 🌶\n"


async def create(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json={"input": "hi", **body})
    assert answer.status_code == 200, answer.text
    shape: dict[str, Any] = answer.json()
    return shape


async def messages(client: httpx.AsyncClient, engine: FakeEngine, **body: Any) -> Any:
    await create(client, **body)
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.add_generation_prompt
    return prompt.messages


async def refused(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json={"input": "hi", **body})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# --- whole answers -------------------------------------------------------------------------------


async def test_answer_has_the_published_shape(client: httpx.AsyncClient) -> None:
    body = await create(client, input="hello", metadata={"a": "b"}, user="me")
    Response.model_validate(body, strict=True)
    assert body.keys() == RESPONSE.keys()
    (item,) = body["output"]
    assert item.keys() == RESPONSE["output"][0].keys()
    assert item["content"] == [
        {"type": "output_text", "annotations": [], "logprobs": [], "text": TEXT}
    ]
    assert (item["role"], item["status"], item["type"]) == ("assistant", "completed", "message")
    assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
    assert (body["metadata"], body["user"], body["model"]) == ({"a": "b"}, "me", "tiny")
    assert body["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 2},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
    }


async def test_a_full_answer_is_incomplete(client: httpx.AsyncClient) -> None:
    body = await create(client, max_output_tokens=2)
    assert (body["status"], body["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert (body["completed_at"], body["max_output_tokens"]) == (None, 2)
    assert body["output"][0]["status"] == "incomplete"
    assert body["output"][0]["content"][0]["text"] == "Hello"
    Response.model_validate(body, strict=True)


async def test_an_answer_is_as_long_as_fits_by_default(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await create(client)
    assert engine.requests[-1].sampling.max_tokens is None


async def test_sampling_fields_reach_the_engine_and_effective_ones_are_told(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.default_sampling = {"temperature": 0.5, "top_k": 7}
    fields: dict[str, Any] = {"seed": 3, "stop": "x", "min_tokens": 1, "cache_salt": "s"}
    body = await create(client, top_p=0.25, max_output_tokens=9, **fields)
    sampling = engine.requests[-1].sampling
    assert (sampling.seed, sampling.stop, sampling.min_tokens, sampling.top_k) == (3, ("x",), 1, 7)
    assert (sampling.max_tokens, engine.requests[-1].cache_salt) == (9, "s")
    assert (body["temperature"], body["top_p"]) == (0.5, 0.25)


async def test_log_probabilities(client: httpx.AsyncClient) -> None:
    body = await create(client, include=[LOGPROBS], top_logprobs=2)
    told = body["output"][0]["content"][0]["logprobs"]
    assert [one["logprob"] for one in told] == [-3.0] * 3
    assert [[top["token"] for top in one["top_logprobs"]] for one in told] == [["t1", "t2"]] * 3
    assert body["top_logprobs"] == 2
    Response.model_validate(body, strict=True)
    plain = await create(client, include=[LOGPROBS])
    assert plain["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []


async def test_two_answers_never_share_an_id(client: httpx.AsyncClient) -> None:
    headers = {"X-Request-Id": "same"}
    ids = [
        (await client.post(PATH, json={"input": "hi"}, headers=headers)).json()["id"]
        for _ in range(2)
    ]
    assert ids[0] != ids[1]


async def test_a_failed_answer_is_a_500(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.error = "The logits are not finite."
    answer = await client.post(PATH, json={"input": "hi"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "generation_failed"


async def test_an_engine_that_loads_or_died_is_a_503(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.is_ready = False
    assert (await client.post(PATH, json={"input": "hi"})).status_code == 503
    engine.die("killed")
    assert (await client.post(PATH, json={"input": "hi"})).status_code == 503


# --- input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "ab",
        [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        [
            {"type": "output_text", "text": "a", "annotations": []},
            {"type": "refusal", "refusal": "b"},
        ],
    ],
)
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
async def test_text_is_the_same_in_every_form(
    client: httpx.AsyncClient, engine: FakeEngine, role: str, content: Any
) -> None:
    seen = await messages(client, engine, input=[{"role": role, "content": content}])
    assert seen == [{"role": "system" if role == "developer" else role, "content": "ab"}]


async def test_instructions_come_first(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    items = [
        {"type": "message", "role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
    ]
    assert await messages(client, engine, input=items, instructions="i") == [
        {"role": "system", "content": "i"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "u"},
    ]


async def test_an_answer_can_be_sent_back_as_input(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    first = await create(client)
    seen = await messages(
        client, engine, input=[*first["output"], {"role": "user", "content": "?"}]
    )
    assert seen == [{"role": "assistant", "content": TEXT}, {"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (None, "input"),
        (7, "input"),
        ([], "input"),
        (["a"], "input[0]"),
        ([{"content": "a"}], "input[0].role"),
        ([{"role": "tool", "content": "a"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": "a", "id": 3}], "input[0].id"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": ["a"]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ([{"type": "function_call", "name": "f"}], "input[0].type"),
        ([{"type": "function_call_output", "output": ""}], "input[0].type"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        ([{"type": ["message"], "role": "user", "content": ""}], "input[0].type"),
        ([{"role": "user", "content": ""}] * 4097, "input"),
    ],
)
async def test_wrong_input_is_refused_by_name(
    client: httpx.AsyncClient, value: Any, param: str
) -> None:
    error = await refused(client, input=value)
    assert error["param"] == param
    if param.endswith("].type"):
        assert error["code"] == "unsupported_parameter"


# --- fields --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "tools": [], "tool_choice": "none", "reasoning": None, "echo": False},
        {
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "reasoning": {"effort": None},
        },
        {"truncation": "disabled", "include": ["reasoning.encrypted_content"], "text": None},
        {"parallel_tool_calls": False, "max_tool_calls": 3, "service_tier": "auto"},
        {"prompt_cache_key": "k", "safety_identifier": "s", "prompt_cache_retention": "24h"},
        {"logprobs": None, "max_tokens": None, "conversation": None, "background": False},
        {"something_new": {"a": 1}},
    ],
)
async def test_what_asks_for_nothing_is_accepted(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    await create(client, **fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": "plain"}, "text"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"conversation": "c"}, "conversation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"priority": "1"}, "priority"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"min_tokens": 5, "max_output_tokens": 2}, "min_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"include": ["nothing"]}, "include[0]"),
        ({"include": LOGPROBS}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
        ({"top_logprobs": -1, "include": [LOGPROBS]}, "top_logprobs"),
        ({"truncation": "middle"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"instructions": ["a"]}, "instructions"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    error = await refused(client, **fields)
    assert error["param"] == param
    assert param.partition(".")[0].partition("[")[0] in error["message"]
    assert engine.requests == []


async def test_refusals_use_the_names_of_this_route(client: httpx.AsyncClient) -> None:
    error = await refused(client, min_tokens=5, max_output_tokens=2)
    assert "at most max_output_tokens=2" in error["message"]


# --- truncation ----------------------------------------------------------------------------------

LONG: list[dict[str, str]] = [
    {"role": "developer", "content": "DDDD"},
    *({"role": role, "content": text * 10} for text in "abcde" for role in ("user", "assistant")),
    {"role": "user", "content": "f" * 10},
]


@pytest.mark.parametrize(
    ("max_output_tokens", "kept"),
    [(None, "DDDDddeef"), (10, "DDDDddeef"), (11, "DDDDeef"), (40, "DDDDf"), (60, "DDDDf")],
)
async def test_the_oldest_turns_are_dropped_until_it_fits(
    client: httpx.AsyncClient, engine: FakeEngine, max_output_tokens: int | None, kept: str
) -> None:
    """The fake window has 64 tokens, and a character is a token."""
    fields: dict[str, Any] = {"truncation": "auto", "max_output_tokens": max_output_tokens}
    seen = await messages(client, engine, input=LONG, **fields)
    text = "".join(m["content"] if m["role"] == "system" else m["content"][0] for m in seen)
    assert text == kept
    assert seen[1]["role"] == "user"


async def test_nothing_is_dropped_that_fits_or_by_default(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    assert len(await messages(client, engine, input=LONG[:4], truncation="auto")) == 4
    assert len(await messages(client, engine, input=LONG)) == len(LONG)
    assert len(await messages(client, engine, input="x" * 100, truncation="auto")) == 1


async def test_a_conversation_of_one_turn_is_not_tokenised_for_truncation(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is: it stays whole, and the engine refuses it by its size alone."""

    async def tokenize(prompt: Any) -> list[int]:
        raise AssertionError(prompt)

    monkeypatch.setattr(engine, "tokenize", tokenize)
    one_turn = [{"role": "developer", "content": "D"}, {"role": "user", "content": "x" * 100}]
    assert len(await messages(client, engine, input=one_turn, truncation="auto")) == 2
